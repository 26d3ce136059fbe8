"""`shardtune` as one rank of several on the same GPU: NCCL takes one process per card, so that all groups are gloo's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_open = dist.init_process_group


def _with_gloo(_backend: str, **how: Any) -> None:
    _open("gloo", **{**how, "device_id": None})


def _gathered(tensor: DTensor) -> torch.Tensor:
    """`full_tensor` without functional collectives, which crash in gloo with CUDA tensors (torch 2.11)."""
    group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    rows = -(-len(tensor) // dist.get_world_size(group))
    local = tensor.to_local().cpu()
    mine = local.new_zeros(rows, *local.shape[1:])
    mine[: len(local)] = local
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts)[: len(tensor)].to(tensor.device)


if __name__ == "__main__":
    dist.init_process_group = _with_gloo
    DTensor.full_tensor = _gathered  # type: ignore[assignment,method-assign]
    torch.cuda.set_per_process_memory_fraction(0.2)
    from shardtune.cli.main import main

    main()
