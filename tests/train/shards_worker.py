"""Run on ranks by test_shards.py: the same gradients and steps, torch's way and ours; each rank writes what it saw."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtune.config.schema import ParallelSection
from shardtune.parallel.mesh import build_mesh
from shardtune.parallel.processes import Processes, join
from shardtune.train.guards.numbers import drop_if_not_finite
from shardtune.train.shards import clip_shards, local_shard

LAYERS = 3
WORLDS = (1, 2, 3, 4)


@cache
def mesh(processes: Processes) -> DeviceMesh:
    """One replica on up to three ranks, two by two on four."""
    return build_mesh(processes, 2 if processes.world_size == 4 else None).base


def sharded(processes: Processes, dtype: torch.dtype = torch.float32, *, unused: bool = True) -> nn.Sequential:
    """Rows that no number of ranks divides, several parameters a unit, `unused`: one that no batch gives a gradient."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(dtype)
    if unused:
        model.register_parameter("unused", nn.Parameter(torch.ones(4, 2, dtype=dtype)))
    for layer in layers:
        fully_shard(layer, mesh=mesh(processes), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model, mesh=mesh(processes))
    return model


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    some = next(model.parameters())
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).to(some.dtype)
    (model(rows).square().sum() * scale).backward()


def shards(model: nn.Module, *, gradients: bool = False) -> list[torch.Tensor]:
    held = [p.grad if gradients else p.detach() for p in model.parameters()]
    return [local_shard(tensor) for tensor in held if tensor is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def clipping(processes: Processes, dtype: torch.dtype, max_norm: float) -> dict[str, Any]:
    ours, torchs = sharded(processes, dtype), sharded(processes, dtype)
    found = []
    for seed in range(20):  # roundings differ in one of two cases where the order of operations does
        ours.zero_grad()
        backward(ours, seed, scale=10.0 ** (seed % 3))
        if seed % 4 == 0:
            backward(ours, seed + 100)  # accumulated
        for parameter, twin in zip(ours.parameters(), torchs.parameters(), strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.clone()
        before = shards(ours, gradients=True)[0].clone()
        own = clip_shards(ours.parameters(), max_norm)
        stock = torch.nn.utils.clip_grad_norm_(torchs.parameters(), max_norm)
        assert own is not None and not isinstance(own, DTensor) and isinstance(stock, DTensor)
        found.append(
            {
                "norm": bool(own == stock.full_tensor()),
                "gradients": same(shards(ours, gradients=True), shards(torchs, gradients=True)),
                "clipped": not torch.equal(before, shards(ours, gradients=True)[0]),
            }
        )
    return {name: [one[name] for one in found] for name in found[0]}


class WholeTensors(TorchDispatchMode):
    """How often torch has to think about a tensor as a whole."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += DTensor in types
        return function(*args, **(kwargs or {}))


class Fills(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.masked_fill_.Scalar
        return function(*args, **(kwargs or {}))


def dropping(processes: Processes, norm: float) -> dict[str, Any]:
    model = sharded(processes)
    backward(model, 0)
    before = [shard.clone() for shard in shards(model, gradients=True)]
    with Fills() as fills:
        drop_if_not_finite(model.parameters(), torch.tensor(norm))
    after = shards(model, gradients=True)
    return {
        "kernels": fills.count,
        "unchanged": same(before, after),
        "zero": not any(shard.any() for shard in after),
        "weights": all(bool(p.any()) for p in shards(model) if p.numel()),
    }


def main(out: str) -> None:
    with join(ParallelSection(device="cpu")) as processes:
        seen = {
            "clip": clipping(processes, torch.float32, 0.5),
            "bf16": clipping(processes, torch.bfloat16, 0.5),
            "norm alone": clipping(processes, torch.float32, float("inf")),
            "good": dropping(processes, 3.0),
            "nan": dropping(processes, float("nan")),
            "inf": dropping(processes, float("inf")),
        }
        (Path(out) / f"rank{processes.rank}of{processes.world_size}.json").write_text(json.dumps(seen))
