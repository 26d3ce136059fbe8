"""What are a step's losses and gradient norm on every rank, without a GPU sync? And how is a step undone?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardtune.train.shards import local_shard

if TYPE_CHECKING:
    from shardtune.parallel.processes import Processes


class HostNumber:
    """A scalar being copied from the device to the host: read later, it is there without waiting."""

    def __init__(self, number: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._number = number.detach()
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._number.copy_(number.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._number)


@dataclass(frozen=True)
class Seen:
    """One optimizer step as all ranks know it.

    Attributes:
        losses: Each rank's loss; their mean is the step's (the loop has multiplied each by the number of ranks).
        bad: For each rank the first of its micro-batches with a NaN or infinite loss, or -1.
        norm: The gradient norm over all ranks, before clipping.
    """

    step: int
    losses: tuple[float, ...]
    bad: tuple[int, ...]
    norm: HostNumber | None

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def exchange(step: int, losses: list[float], norm: torch.Tensor | None, processes: Processes) -> Seen:
    """All-gather the losses through the control group, which never waits for a GPU. A collective."""
    first_bad = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), -1)
    mine = torch.tensor([sum(losses), first_bad], dtype=torch.float64)
    everyone = [mine]
    if processes.world_size > 1:
        everyone = [torch.empty_like(mine) for _ in range(processes.world_size)]
        dist.all_gather(everyone, mine, group=processes.control)
    return Seen(
        step,
        losses=tuple(float(one[0]) for one in everyone),
        bad=tuple(int(one[1]) for one in everyone),
        norm=None if norm is None else HostNumber(norm),
    )


def drop_if_not_finite(parameters: Iterable[torch.Tensor], norm: torch.Tensor) -> None:
    """Zero all gradients on the device, without a sync, where their norm is NaN or infinite.

    So the optimizer never sees such a gradient, even where the host reads the norm a step later and stops then.
    """
    broken = ~torch.isfinite(norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for buffer in _buffers(gradients):
        buffer.masked_fill_(broken, 0)


def _buffers(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The storage behind them: FSDP2 reduces the gradients of a unit in one flat buffer, and each is a view of it.

    So there is one kernel per layer, not one per adapter. The rest of a buffer is padding.
    """
    buffers: dict[int, torch.Tensor] = {}
    for gradient in gradients:
        shard = local_shard(gradient)
        base = shard._base if isinstance(gradient, DTensor) else None
        buffer = base if base is not None and base.dim() == 1 else shard
        buffers[id(buffer)] = buffer
    return list(buffers.values())
