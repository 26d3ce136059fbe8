"""Losses and gradients as a test wants them: what is computed is spoilt in chosen steps, on all ranks or one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardtune.train.trainer import ShardedSFTTrainer

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
    honest = ShardedSFTTrainer._loss_of

    def loss_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = honest(self, *args, **kwargs)
        spoil = steps.get(self.state.global_step + 1)
        mine = rank in (None, int(os.environ.get("RANK", "0"))) and micro in (None, len(self.micro_losses))
        return spoil(loss) if self.model.training and spoil is not None and mine else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedSFTTrainer, "_loss_of", loss_of)
        yield
