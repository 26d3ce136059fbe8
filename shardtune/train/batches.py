"""What does each step see? Loaders over the prepared rows, in the order that the seed and the effective batch give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardtune.data.collate import SUPERVISED
from shardtune.data.order import Documents, StepOrder
from shardtune.run.stop_request import ignore_stop_signals

if TYPE_CHECKING:
    from shardtune.config.schema import TrainSection
    from shardtune.parallel.processes import Processes
    from shardtune.train.context import Data

Batch = dict[str, Any]  # tensors, and plain numbers that are never sent to a device


class TrainBatches:
    """The training rows as optimizer steps, each a list of this rank's micro-batches."""

    def __init__(self, data: Data, train: TrainSection, processes: Processes) -> None:
        self.rows, self.accumulation = data.train, train.accumulation
        self.order = StepOrder(
            len(data.train),
            micro_batch=train.micro_batch,
            accumulation=train.accumulation,
            world_size=processes.world_size,
            rank=processes.rank,
            seed=train.seed if train.data_seed is None else train.data_seed,
        )
        self.loader = _loader(data.train, data, self.order, train, processes)

    def epoch(self, epoch: int, done: int = 0) -> Iterator[list[Batch]]:
        """The steps of an epoch; the first `done` of them are passed over without being read."""
        self.order.set_epoch(epoch, skip=done * self.accumulation)
        batches = iter(self.loader)
        for first in range(done * self.accumulation, len(self.order), self.accumulation):
            yield [next(batches) for _ in range(min(self.accumulation, len(self.order) - first))]

    def rows_of_step(self, step: int, rank: int | None = None, micro: int | None = None) -> list[str]:
        """Names of the rows that step `step` (from 1) trains on: `train:812` is row 812 of the prepared data."""
        rows = self.order.rows_of(step - 1, rank, micro)
        return [f"train:{member}" for row in rows for member in self.rows.members(row)]


def eval_loader(data: Data, train: TrainSection, processes: Processes) -> DataLoader:
    """The validation rows in their own order."""
    assert data.val is not None
    order = StepOrder(
        len(data.val),
        micro_batch=train.per_device_eval_batch_size,
        accumulation=1,
        world_size=processes.world_size,
        rank=processes.rank,
        seed=None,
    )
    return _loader(data.val, data, order, train, processes)


def supervised_tokens(batches: list[Batch]) -> int:
    """Of this rank's micro-batches."""
    return sum(len(batch[SUPERVISED]) for batch in batches)


def supervised_over_ranks(batches: list[Batch], processes: Processes) -> int | torch.Tensor:
    """Of all ranks' micro-batches. On several ranks a number of the device, which the host does not wait for."""
    counted, device = supervised_tokens(batches), processes.device
    if processes.world_size == 1:
        return counted
    total = torch.tensor(counted, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    dist.all_reduce(total)
    return total


def to_device(batch: Batch, device: torch.device) -> Batch:
    """From pinned memory nothing waits: the device would otherwise be idle while the first kernels are launched."""
    moved = {
        name: value.to(device, non_blocking=value.is_pinned()) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in moved:  # their number changes with every batch: not a reason to compile again
            torch._dynamo.mark_dynamic(moved[name], 0)
    return moved


def _loader(rows: Documents, data: Data, order: StepOrder, train: TrainSection, processes: Processes) -> DataLoader:
    collator = data.collator
    if collator.fill_to is not None and len(order) > 1:  # otherwise the only batch there is has one shape already
        collator = replace(collator, fill_rows=order.micro_batch)
    return DataLoader(
        rows,
        batch_sampler=order,
        collate_fn=collator,
        num_workers=train.dataloader_num_workers,
        pin_memory=processes.device.type == "cuda" and train.dataloader_pin_memory,
        persistent_workers=train.dataloader_persistent_workers,
        prefetch_factor=train.dataloader_prefetch_factor,
        worker_init_fn=ignore_stop_signals,
        # Its own, or every pass over rows (an evaluation, too) would move the generator that dropout draws from.
        generator=torch.Generator(),
    )
