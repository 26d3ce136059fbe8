"""How many ranks may hold a replica of the base together? By how they lie on nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd


def group_sizes(nodes: Sequence[int]) -> Iterator[int]:
    """How many ranks may share a replica, the fewest first: groups lie within nodes, or are made of whole nodes.

    Args:
        nodes: The number of ranks on each node.
    """
    ranks = sum(nodes)
    return (count for count in range(1, ranks + 1) if ranks % count == 0 and fits_nodes(count, nodes))


def fits_nodes(count: int, nodes: Sequence[int]) -> bool:
    """Whether groups of `count` ranks never hold a part of one node and something of another."""
    of_nodes = {sum(nodes[:node]) for node in range(len(nodes) + 1)}
    of_groups = set(range(0, sum(nodes) + 1, count))
    return of_nodes <= of_groups or of_groups <= of_nodes


def within_a_node(nodes: Sequence[int]) -> int:
    """The largest group that lies within a node everywhere."""
    return gcd(*nodes)
