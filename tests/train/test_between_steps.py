"""What the host does at every step is independent of how many modules there are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from interrupted import run
from running import events
from torch import nn
from toys import toy_config

from shardtune.train.loop import TrainingLoop
from shardtune.train.optimizers import OPTIMIZERS

WALKS = ("train", "zero_grad", "modules", "named_modules", "children", "named_parameters", "parameters")


def test_an_ordinary_step_walks_through_no_modules(
    toy_model: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two of eight steps prove what trains; after the fourth and the last there is an evaluation."""
    walks: Counter[tuple[int, str]] = Counter()
    step = [0]

    def counted(name: str) -> Any:
        stock = getattr(nn.Module, name)

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            walks[step[0], name] += 1
            return stock(self, *args, **kwargs)

        return call

    for name in WALKS:
        monkeypatch.setattr(nn.Module, name, counted(name))
    begin = TrainingLoop.train_step

    def train_step(self: TrainingLoop, batches: Any) -> None:
        step[0] += 1
        assert self.model.training
        assert type(self.optimizer) is OPTIMIZERS["adamw_torch"]
        begin(self, batches)

    monkeypatch.setattr(TrainingLoop, "train_step", train_step)
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
