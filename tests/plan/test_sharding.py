"""Groups of ranks that share a replica, and how they lie on nodes."""

from __future__ import annotations

import pytest

from shardtune.plan.sharding import fits_nodes, group_sizes, within_a_node


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ((1,), [1]),
        ((4,), [1, 2, 4]),
        ((1, 1, 1), [1, 3]),
        ((2, 2), [1, 2, 4]),
        ((2, 2, 2), [1, 2, 6]),
        ((8, 8), [1, 2, 4, 8, 16]),
        ((2, 1), [1, 3]),
        ((4, 2), [1, 2, 6]),
        ((4, 2, 2), [1, 2, 4, 8]),
    ],
)
def test_groups_lie_within_nodes_or_are_made_of_whole_ones(nodes: tuple[int, ...], sizes: list[int]) -> None:
    assert list(group_sizes(nodes)) == sizes
    assert all(fits_nodes(size, nodes) for size in sizes) and within_a_node(nodes) in sizes
    assert not fits_nodes(3, (4, 4, 4))
