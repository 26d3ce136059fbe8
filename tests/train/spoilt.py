"""Losses and gradients as a test wants them: what is computed is spoilt in chosen steps, on all ranks or one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardtune.train.loop import TrainingLoop

Spoil = Callable[[torch.Tensor], torch.Tensor]


def not_a_number(loss: torch.Tensor) -> torch.Tensor:
    return loss * float("nan")


def thousandfold(loss: torch.Tensor) -> torch.Tensor:
    return loss * 1000


class _BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


def infinite_gradient(loss: torch.Tensor) -> torch.Tensor:
    """A good loss whose gradient is none."""
    broken: torch.Tensor = _BreaksBackward.apply(loss)
    return broken


@contextmanager
def spoilt(steps: dict[int, Spoil], rank: int | None = None, micro: int | None = None) -> Iterator[None]:
    """`steps`: by number, what happens to the loss; of one rank or micro-batch, where given."""
    honest, train_step = TrainingLoop.normalise, TrainingLoop.train_step
    seen = [0]  # micro-batches of the step

    def begin(self: TrainingLoop, batches: Any) -> None:
        seen[0] = 0
        train_step(self, batches)

    def normalise(self: TrainingLoop, *args: Any) -> torch.Tensor:
        loss = honest(self, *args)
        spoil = steps.get(self.state.global_step + 1)
        mine = rank in (None, int(os.environ.get("RANK", "0"))) and micro in (None, seen[0])
        seen[0] += 1
        return spoil(loss) if spoil is not None and mine else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "train_step", begin)
        patch.setattr(TrainingLoop, "normalise", normalise)
        yield
