"""What the host does at every step is independent of how many modules there are, and means what it always meant."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import run
from running import events
from shardtune.train.steps import spare_walks, trained_parameters
from shardtune.train.trainer import ShardedSFTTrainer
from torch import nn
from toys import toy_config
from trl import SFTTrainer

from shardtune.train.optimizers import OPTIMIZERS

WALKS = ("train", "zero_grad", "modules", "named_modules", "children", "named_parameters", "parameters")


def test_an_ordinary_step_walks_through_no_modules_and_counts_what_transformers_counts(
    toy_model: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two of eight steps prove what trains; after the fourth and the last there is an evaluation."""
    walks: Counter[tuple[int, str]] = Counter()
    counts: list[tuple[int, int]] = []
    step = [0]

    def counted(name: str) -> Any:
        stock = getattr(nn.Module, name)

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            walks[step[0], name] += 1
            return stock(self, *args, **kwargs)

        return call

    for name in WALKS:
        monkeypatch.setattr(nn.Module, name, counted(name))
    flops, begin = ShardedSFTTrainer.floating_point_ops, ShardedSFTTrainer.get_batch_samples

    def floating_point_ops(self: ShardedSFTTrainer, inputs: dict[str, Any]) -> int:
        found = flops(self, inputs)
        if step[0] <= 2:  # transformers' way walks
            counts.append((found, SFTTrainer.floating_point_ops(self, inputs)))
        return found

    def get_batch_samples(self: ShardedSFTTrainer, *args: Any) -> Any:
        step[0] += 1
        assert step[0] == 1 or self.model.training
        assert type(self.bare_optimizer) is OPTIMIZERS["adamw_torch"]
        return begin(self, *args)

    monkeypatch.setattr(ShardedSFTTrainer, "floating_point_ops", floating_point_ops)
    monkeypatch.setattr(ShardedSFTTrainer, "get_batch_samples", get_batch_samples)
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "gradient_accumulation_steps": 2},
    )  # fmt: skip
    assert run(config, run_id="walks") == 0
    assert len(events(tmp_path / "runs" / "walks", "step")) == 8
    ordinary = (3, 6, 7)  # at every fifth the adapters are looked at
    assert [(at, name) for at, name in walks if at in ordinary] == []
    assert walks[4, "train"] > 0  # the evaluation after it: the count itself works
    assert len(counts) == 4 and all(own == theirs > 0 for own, theirs in counts)


class Told(nn.Linear):
    """Does something of its own when it is told to train, as DoRA's layer does."""

    told = 0

    def train(self, mode: bool = True) -> Told:
        self.told += mode
        super().train(mode)
        return self


def toy() -> tuple[nn.Sequential, list[nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)))
    model[0].requires_grad_(False)
    trained = trained_parameters(model)
    assert trained == list(model[1].parameters())
    return model, trained


def test_a_model_that_is_told_to_train_trains_whatever_was_switched_off_before() -> None:
    model, trained = toy()
    spare_walks(model, trained)
    assert model.train() is model
    assert model.eval() is model and not any(module.training for module in model.modules())
    assert model.train() is model and all(module.training for module in model.modules())
    model[1][0].eval()  # one of many
    model.train()
    assert all(module.training for module in model.modules())
    model.train(False)
    assert not any(module.training for module in model.modules())


def test_a_module_with_a_train_of_its_own_is_told_every_time() -> None:
    inner = Told(3, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(inner))
    spare_walks(model, [])
    model.train(), model.train()
    assert inner.told == 2
    outer = Told(3, 3)
    spare_walks(outer, [])
    outer.train()
    assert outer.told == 1


def test_gradients_are_cleared_as_asked_for() -> None:
    model, trained = toy()
    spare_walks(model, trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trained)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in trained)
