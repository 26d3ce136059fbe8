"""Bytes counted as collectives are issued are those that the plan's arithmetic gives for the same sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

from shardtune.plan.traffic import ModelBytes, step_traffic

WORKER = Path(__file__).parent / "traffic_counter_worker.py"


@pytest.fixture(scope="module")
def seen(shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By number of ranks, which are two nodes, what each rank has seen."""
    out = tmp_path_factory.mktemp("traffic")
    on_ranks(shared_environment, WORKER, (2, 4), out)
    return {
        world: [json.loads((out / f"rank{rank}of{world}.json").read_text()) for rank in range(world)]
        for world in (2, 4)
    }


def model_bytes(parameters: dict[str, int], element: int, reduced: int = 4) -> ModelBytes:
    layers, root = parameters["layers"] * element, parameters["root"] * element
    return ModelBytes(layers, root, parameters["trained"], gathered=element, reduced=reduced)


@pytest.mark.parametrize(
    ("case", "element", "reduced", "reshard", "micro_batches"),
    [
        ("float32", 4, 4, True, 1),
        ("bf16", 2, 4, True, 2),
        ("bf16 kept", 2, 2, False, 2),
        ("compiled", 2, 4, True, 2),
    ],
)
def test_a_fully_sharded_step_sends_what_the_plan_says(
    seen: dict[int, Any], case: str, element: int, reduced: int, reshard: bool, micro_batches: int
) -> None:
    for rank in seen[2]:
        model = model_bytes(rank[case]["sizes"], element, reduced)
        planned = step_traffic(
            model, replicas=1, nodes=(0, 1), micro_batches=micro_batches, reshard_after_forward=reshard
        )
        assert rank[case]["sent"] == {
            "collectives": {"shard": planned.shard, "replicate": 0, "other": 0},
            "collectives_between_nodes": {"shard": planned.between_nodes, "replicate": 0, "other": 0},
        }
        assert planned.shard > 10_000


def test_between_the_nodes_of_a_hybrid_mesh_go_only_the_adapters_gradients(seen: dict[int, Any]) -> None:
    sent = [rank["hybrid"]["sent"] for rank in seen[4]]
    parameters = seen[4][0]["hybrid"]["sizes"]
    planned = step_traffic(model_bytes(parameters, 2), replicas=2, nodes=(0, 0, 1, 1))
    for rank in sent:
        assert rank["collectives"] == {"shard": planned.shard, "replicate": planned.replicate, "other": 0}
        assert rank["collectives_between_nodes"] == {"shard": 0, "replicate": planned.replicate, "other": 0}
    # Each rank all-reduces its half of the gradients, float32, with one other rank: a half of that, twice.
    assert planned.replicate == parameters["trained"] * 4 // 2
    assert sum(rank["collectives_between_nodes"]["replicate"] for rank in sent[:2]) == planned.between_nodes


def test_what_is_neither_weight_nor_gradient_is_counted_apart(seen: dict[int, Any]) -> None:
    for rank in seen[2]:
        norms, tokens, flags = 4 * rank["float32"]["norms"], 8, 1
        assert rank["float32"]["rest"] == {"shard": 0, "replicate": 0, "other": norms + tokens + flags}


def test_a_counter_that_is_closed_counts_nothing_and_leaves_nothing_behind(seen: dict[int, Any]) -> None:
    for rank in (*seen[2], *seen[4]):
        assert rank["restored"]
    for rank in seen[2]:
        assert rank["float32"]["after"] == {"shard": 0, "replicate": 0, "other": 0}
