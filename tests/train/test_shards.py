"""Clipping and dropping on shards give what torch gives for sharded tensors, bit for bit, on 1 to 4 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from shards_worker import LAYERS, WORLDS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import Processes
from shardtune.train.shards import clip_shards

WORKER = Path(__file__).parent / "shards_worker.py"


@pytest.fixture(scope="module")
def seen(
    shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each has seen."""
    out = tmp_path_factory.mktemp("shards")
    on_ranks(shared_environment, WORKER, WORLDS, out)
    return {
        world: [json.loads((out / f"rank{rank}of{world}.json").read_text()) for rank in range(world)]
        for world in WORLDS
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ["clip", "bf16", "norm alone"])
def test_norm_and_clipped_gradients_are_those_of_torch(seen: dict[int, Any], world: int, case: str) -> None:
    for rank in seen[world]:
        assert all(rank[case]["norm"]) and all(rank[case]["gradients"])
        assert any(rank[case]["clipped"]) == (case != "norm alone")


@pytest.mark.parametrize("world", WORLDS)
def test_a_bad_steps_gradients_become_zero_by_one_kernel_a_unit(seen: dict[int, Any], world: int) -> None:
    for rank in seen[world]:
        assert rank["good"] == {"kernels": LAYERS, "unchanged": True, "zero": False, "weights": True}
        for case in ("nan", "inf"):
            assert rank[case] == {"kernels": LAYERS, "unchanged": False, "zero": True, "weights": True}


def with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_what_fsdp_did_not_shard_over_one_mesh_is_left_to_torch(processes: Processes) -> None:
    whole = torch.full((4, 3), 2.0)
    mesh, grid = build_mesh(processes).base, init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    fit = distribute_tensor(whole, mesh, [Shard(0)])
    assert clip_shards([with_gradient(fit)], 1.0) == pytest.approx(48**0.5)
    unfit = {
        "plain": whole,
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "another dtype": distribute_tensor(whole.bfloat16(), mesh, [Shard(0)]),
        "another mesh": distribute_tensor(whole, grid["a"], [Shard(0)]),
        "two dimensions": distribute_tensor(whole, grid, [Replicate(), Shard(0)]),
    }
    for name, gradient in unfit.items():
        first = distribute_tensor(whole, mesh, [Shard(0)])
        for gradients in ([first, gradient], [gradient, first]):
            before = [one.clone() for one in gradients]
            assert clip_shards([with_gradient(one) for one in gradients], 1.0) is None, name
            for one, other in zip(gradients, before, strict=True):
                assert torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)), name
    assert clip_shards([nn.Parameter(torch.zeros(3))], 1.0) is None
