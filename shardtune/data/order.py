"""In which order are rows seen? By seed and effective batch alone, never by the number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from shardtune.data.tokens import IGNORED

if TYPE_CHECKING:
    from shardtune.data.packing import Packs
    from shardtune.data.prepared import Prepared

BLANK = -1  # stands for "no row": a rank without one still has to take part in the collectives of the step


class StepOrder(Sampler[list[int]]):
    """This rank's micro-batches of one epoch, as lists of row numbers.

    Rows are permuted once per epoch from the seed and cut into optimizer steps of `effective_batch` rows; the rows of a
    step go to micro-batch and rank in turn. So step k sees the same rows on 1, 2 or 3 processes with the same effective
    batch. The last step of an epoch may be smaller; ranks it does not reach get a BLANK, never a repeated row
    (accelerate repeats rows from the start of the epoch).

    Args:
        rows: Rows in the dataset.
        micro_batch: Rows one process sees in one forward pass.
        accumulation: Micro-batches per optimizer step (1 for evaluation).
        seed: Seed of the permutation; None keeps the rows' own order.
    """

    def __init__(
        self, rows: int, *, micro_batch: int, accumulation: int, world_size: int, rank: int, seed: int | None
    ) -> None:
        self.rows, self.micro_batch, self.accumulation = rows, micro_batch, accumulation
        self.world_size, self.rank, self.seed = world_size, rank, seed
        self.epoch = self.skip = 0

    @property
    def effective_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """`skip`: micro-batches at the beginning of the epoch that are left out (a resumed run has seen them)."""
        self.epoch, self.skip = epoch, skip

    def __len__(self) -> int:
        """Micro-batches in an epoch."""
        return math.ceil(self.rows / (self.micro_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._permutation(self.epoch)
        across = self.micro_batch * self.world_size  # rows all ranks see in one micro-batch
        for start in range(self.skip * across, self.rows, across):
            mine = start + self.rank * self.micro_batch
            # A micro-batch never reaches into the next optimizer step: `across` divides the effective batch.
            yield order[mine : min(mine + self.micro_batch, start + across)] or [BLANK]

    def rows_of(self, step: int, rank: int | None = None, micro: int | None = None) -> list[int]:
        """Which rows an optimizer step sees (counted from 0, through all epochs): all, or those of one rank or
        micro-batch. Asked when something is wrong with a step."""
        epoch, place = divmod(step, math.ceil(self.rows / self.effective_batch))
        rows = self._permutation(epoch)[place * self.effective_batch : (place + 1) * self.effective_batch]
        across = self.micro_batch * self.world_size
        return [
            row
            for index, row in enumerate(rows)
            if micro in (None, index // across) and rank in (None, index % across // self.micro_batch)
        ]

    def part(self, batch: int, parts: int) -> int:
        """Which of `parts` equal stretches of an epoch a micro-batch lies in, counted over all ranks. (Of fewer
        micro-batches than parts each is its own.)"""
        batches = math.ceil(self.rows / self.micro_batch)
        return min(batch, batches - 1) * min(parts, batches) // batches

    def _permutation(self, epoch: int) -> list[int]:
        if self.seed is None:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.rows, generator=generator).tolist()


class Documents(Dataset):
    """What one row of a batch holds: its documents, each as (ids, labels). One document, or a pack of them.

    BLANK gives a row in which no token carries loss.
    """

    def __init__(self, prepared: Prepared, packs: Packs | None) -> None:
        self.prepared, self.packs = prepared, packs

    def __len__(self) -> int:
        return len(self.prepared if self.packs is None else self.packs)

    def members(self, number: int) -> list[int]:
        """The rows of the prepared data that this one is made of."""
        return [number] if self.packs is None else [int(member) for member in self.packs.members(number)]

    def __getitem__(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        if number == BLANK:
            ids, _ = self.prepared.row(0)
            return [(ids[:2], np.full(len(ids[:2]), IGNORED, dtype=ids.dtype))]
        return [self.prepared.row(member) for member in self.members(number)]
