"""Bytes of a step, computed by hand: layers of 800 bytes, a root of 80, 12 trained parameters (2 bytes, gradients 4)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from running import REPOSITORY

from shardtune.plan.traffic import (
    AdapterLayout,
    ModelBytes,
    StepTraffic,
    adapter_layout,
    step_traffic,
    traffic_sentence,
)
from shardtune.plan.traffic_page import BEGIN, END, table

MODEL = ModelBytes(layers=800, root=80, trained=12)
TWO_BY_TWO = (0, 0, 1, 1)


def test_full_sharding_gathers_layers_twice_and_the_root_once_per_micro_batch() -> None:
    # Half of 2 * (2 * (800 + 24) + 80) bytes gathered and of 48 bytes of gradients goes to the other rank.
    sent = step_traffic(MODEL, replicas=1, nodes=(0, 1), micro_batches=2)
    assert sent == StepTraffic(shard=1728 + 24, replicate=0, between_nodes=1752)


def test_layers_that_stay_gathered_are_sent_once_per_step() -> None:
    sent = step_traffic(MODEL, replicas=1, nodes=(0, 1), micro_batches=2, reshard_after_forward=False)
    assert sent.shard == (800 + 24 + 80 + 48) // 2


def test_offloaded_parameters_are_gathered_and_their_gradients_reduced_for_every_micro_batch() -> None:
    once = step_traffic(MODEL, replicas=1, nodes=(0, 1), micro_batches=3)
    every = step_traffic(MODEL, replicas=1, nodes=(0, 1), micro_batches=3, offload_params=True)
    assert every.shard - once.shard == 2 * 24
    kept = step_traffic(
        MODEL, replicas=1, nodes=(0, 1), micro_batches=3, reshard_after_forward=False, offload_params=True
    )
    assert kept.shard == 3 * (800 + 24 + 80 + 48) // 2


def test_between_nodes_of_a_hybrid_mesh_go_only_gradients() -> None:
    # Sharded in two: half of 2 * 824 + 80 bytes, and of 48. Each rank all-reduces its 24 bytes with one other.
    sent = step_traffic(MODEL, replicas=2, nodes=TWO_BY_TWO)
    assert sent == StepTraffic(shard=864 + 24, replicate=24, between_nodes=2 * 24)
    assert step_traffic(replace(MODEL, layers=10**9), replicas=2, nodes=TWO_BY_TWO).between_nodes == 2 * 24


def test_of_several_groups_in_a_node_only_the_ring_neighbours_on_another_node_count() -> None:
    # Four groups of two on two nodes of four: 0 and 1 send their gradients to 2 and 3, which are on the same node.
    sent = step_traffic(MODEL, replicas=4, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    assert (sent.replicate, sent.between_nodes) == (2 * 24 * 3 // 4, 2 * 36)


def test_a_shard_group_that_spans_nodes_sends_from_one_rank_of_each() -> None:
    sent = step_traffic(MODEL, replicas=1, nodes=TWO_BY_TWO)
    assert sent.shard == (2 * 824 + 80 + 48) * 3 // 4 == sent.between_nodes
    across = step_traffic(MODEL, replicas=2, nodes=(0, 0, 0, 1, 1, 1))  # groups of three, each on one node
    assert across.between_nodes == 3 * across.replicate
    uneven = step_traffic(MODEL, replicas=2, nodes=(0, 0, 1, 1, 2, 2))  # groups of three on nodes of two
    assert uneven.between_nodes == 2 * uneven.shard + 2 * uneven.replicate  # the node that both groups share


@pytest.mark.parametrize(
    ("adapters", "shard", "replicate"), [("sharded", (24 + 48) * 2 // 3, 0), ("replicated", 0, 2 * 48 * 2 // 3)]
)
def test_replicated_bases_send_only_what_trains_once_per_step(adapters: str, shard: int, replicate: int) -> None:
    sent = step_traffic(MODEL, replicas=3, nodes=(0, 1, 2), micro_batches=8, adapters=adapters)  # type: ignore[arg-type]
    assert sent == StepTraffic(shard, replicate, between_nodes=shard + replicate)


@pytest.mark.parametrize(
    ("gathered", "reduced", "cheaper", "sharded", "replicated"),
    [(2, 4, "sharded", 48, 64), (4, 4, "sharded", 64, 64), (2, 2, "sharded", 32, 32), (4, 2, "replicated", 48, 32)],
)
def test_adapters_are_laid_out_as_sends_less_and_sharded_if_it_is_the_same(
    gathered: int, reduced: int, cheaper: str, sharded: int, replicated: int
) -> None:
    layout = adapter_layout(replace(MODEL, gathered=gathered, reduced=reduced), ranks=3)
    assert layout == AdapterLayout(cheaper, sharded, replicated)  # type: ignore[arg-type]


def test_one_process_sends_nothing() -> None:
    assert step_traffic(MODEL, replicas=1, nodes=(0,)) == StepTraffic(0, 0, 0)


def test_replicas_of_different_sizes_are_no_mesh() -> None:
    with pytest.raises(ValueError, match="5 ranks are not 2 replicas"):
        step_traffic(MODEL, replicas=2, nodes=(0,) * 5)


def test_a_119b_model_on_three_nodes_in_words() -> None:
    small4 = ModelBytes(layers=118 * 10**9, root=10**9, trained=27_500_000)
    full = step_traffic(small4, replicas=1, nodes=(0, 1, 2), micro_batches=8)
    replicated = step_traffic(small4, replicas=3, nodes=(0, 1, 2), micro_batches=8)
    assert replicated.between_nodes == 110_000_000
    assert traffic_sentence(replicated, full) == (
        "a step sends 105 MiB from each node (full sharding would send 1.15 TiB)"
    )
    assert traffic_sentence(full, full) == "a step sends 1.15 TiB from each node"


def test_on_one_node_the_sentence_is_about_a_process() -> None:
    full = step_traffic(MODEL, replicas=1, nodes=(0, 0))
    assert traffic_sentence(step_traffic(MODEL, replicas=2, nodes=(0, 0)), full) == (
        "a step sends 36 B from each process (full sharding would send 888 B)"
    )


def test_the_table_in_the_docs_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table()}\n{END}" in page, "make reference renews it"
