"""Bytes counted as collectives are issued are those that the plan's arithmetic gives for the same sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks
from traffic_counter_worker import CASES

from shardtune.observe.schema import problems
from shardtune.plan.traffic import ModelBytes, step_traffic

WORKER = Path(__file__).parent / "traffic_counter_worker.py"
HEAD = {"v": 2, "time": 1.5, "rank": 0}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By number of ranks, which are two nodes, what each rank has seen."""
    out = tmp_path_factory.mktemp("traffic")
    on_ranks(shared_environment, WORKER, (2, 4), out)
    return {
        world: [json.loads((out / f"rank{rank}of{world}.json").read_text()) for rank in range(world)]
        for world in (2, 4)
    }


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_the_plan_says(seen: dict[int, Any], name: str) -> None:
    case = CASES[name]
    nodes = [rank * 2 // case.world for rank in range(case.world)]
    left = [0, 0]
    for node, rank in zip(nodes, seen[case.world], strict=True):
        planned = step_traffic(
            ModelBytes(**rank[name]["sizes"]),
            replicas=case.world // (case.shards or case.world),
            nodes=nodes,
            micro_batches=case.micro_batches,
            reshard_after_forward=case.reshard,
            adapters="sharded" if case.shard_adapters else "replicated",
        )
        sent, between_nodes = rank[name]["sent"]["collectives"], rank[name]["sent"]["collectives_between_nodes"]
        assert sent == {"shard": planned.shard, "replicate": planned.replicate, "other": 0}
        left[node] += sum(between_nodes.values())
    assert left == [planned.between_nodes, planned.between_nodes] and planned.between_nodes > 1000


def test_between_the_nodes_of_a_hybrid_mesh_go_only_the_adapters_gradients(seen: dict[int, Any]) -> None:
    for rank in seen[4]:
        gradients = rank["hybrid"]["sizes"]["trained"] * 4
        # Each rank all-reduces its half of them with one other rank: a half of that, twice.
        assert rank["hybrid"]["sent"]["collectives_between_nodes"] == {
            "shard": 0, "replicate": gradients // 2, "other": 0,
        }  # fmt: skip


def test_a_profile_has_what_its_step_sent_and_nothing_of_an_evaluation_before_it(seen: dict[int, Any]) -> None:
    for rank in seen[2]:
        model = ModelBytes(**rank["profiled"]["sizes"])
        planned = step_traffic(model, replicas=1, nodes=(0, 1), micro_batches=CASES["full"].micro_batches)
        assert [profile["collectives"]["shard"] for profile in rank["profiled"]["profiles"]] == [planned.shard] * 2
        assert [problem for profile in rank["profiled"]["profiles"] for problem in problems({**HEAD, **profile})] == []


def test_what_is_neither_weight_nor_gradient_is_counted_apart(seen: dict[int, Any]) -> None:
    for rank in seen[2]:
        norms, tokens, flags = 4 * rank["full"]["norms"], 8, 1
        assert rank["full"]["rest"] == {"shard": 0, "replicate": 0, "other": norms + tokens + flags}


def test_a_counter_that_is_closed_counts_nothing_and_leaves_nothing_behind(seen: dict[int, Any]) -> None:
    assert all(rank["restored"] for rank in (*seen[2], *seen[4]))
    assert all(rank["full"]["after"] == {"shard": 0, "replicate": 0, "other": 0} for rank in seen[2])
