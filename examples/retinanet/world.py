"""Which ranks train together, on which devices? Those of torchrun or `shardtune run`, or one process alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class BackendError(ValueError):
    """The backend does not fit this machine."""


@dataclass(frozen=True)
class World:
    """Attributes:
    control: A gloo group for what is no tensor of the model; None for a single process.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on rank 0; nothing on the others."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.is_main else None, group=self.control)
        return values if self.is_main else []

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.control is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        if self.control is not None:
            dist.all_reduce(values)
            values /= self.size
        return values


def start_world(backend: str | None) -> World:
    """Join the other ranks.

    Args:
        backend: nccl: one GPU for each rank. gloo: gradients go over gloo, between GPUs where there is one for each
            rank. cpu: gloo without GPUs. None: nccl where there are GPUs, otherwise cpu.

    Raises:
        BackendError: nccl without a GPU for each rank.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    backend = backend or ("nccl" if gpus else "cpu")
    if backend == "nccl" and gpus < local_size:
        raise BackendError(f"--backend nccl needs a GPU for each of {local_size} ranks; this machine shows {gpus}.")
    device = torch.device("cpu")
    if backend != "cpu" and gpus >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(0, 1, 0, 1, device, None)
    dist.init_process_group("nccl" if backend == "nccl" else "gloo")
    return World(rank, size, local_rank, local_size, device, dist.new_group(backend="gloo"))
