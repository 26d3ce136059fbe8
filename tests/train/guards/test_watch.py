"""What guards say: once in a while, in one form, and never for an evaluation that gave no number without stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from running import events
from torch import nn

from shardtune.config.schema import GuardsSection, ParallelSection
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import join
from shardtune.train.guards.alarm import Alarm, GuardStop
from shardtune.train.guards.health import HealthChecks
from shardtune.train.guards.watch import Guards


@pytest.fixture
def guards(tmp_path: Path) -> Iterator[Guards]:
    settings = GuardsSection()
    with join(ParallelSection(device="cpu")) as processes:
        health = HealthChecks(settings, processes, None, every=25)
        watch = Guards(settings, Console(record=True, width=200), EventLog(tmp_path, 0), processes, health)
        watch._loop = SimpleNamespace(model=nn.Linear(2, 2), resumed=None)  # type: ignore[assignment]
        yield watch


def test_a_warning_is_not_repeated_in_every_step(guards: Guards, tmp_path: Path) -> None:
    for step in range(30, 55):
        guards._act(Alarm("loss_spike", step, f"The loss of step {step} is high.", rows=("train:3", "train:4")))
    guards._act(Alarm("divergence", 41, "The loss diverges."))
    assert [event["step"] for event in events(tmp_path, "guard")] == [30, 40, 50, 41]
    told = guards.console.export_text()
    assert told.count("guard     loss_spike: The loss of step") == 3 and "Rows: train:3, train:4." in told


def test_an_event_has_what_means_something_and_nothing_else(guards: Guards, tmp_path: Path) -> None:
    guards._act(Alarm("flat_loss", 200, "The loss has not fallen.", value=2.0, limit=1.9))
    (event,) = events(tmp_path, "guard")
    assert {name: event[name] for name in event if name not in ("v", "time", "rank", "event")} == {
        "guard": "flat_loss", "step": 200, "action": "warn", "text": "The loss has not fallen.", "value": 2.0, "limit": 1.9,
    }  # fmt: skip


def test_a_validation_loss_that_is_no_number_stops_the_run(guards: Guards, tmp_path: Path) -> None:
    guards.evaluated(10, 2.5)
    with pytest.raises(GuardStop, match="validation loss is NaN at step 20"):
        guards.evaluated(20, math.nan)
    assert events(tmp_path, "guard")[0]["action"] == "stop"


def test_an_adapter_that_was_no_number_when_the_run_went_on_is_told_from_one_that_became_so(guards: Guards) -> None:
    with torch.no_grad():
        guards.loop.model.weight[1, 1] = math.inf
    guards.loop.resumed = SimpleNamespace(step=4)  # type: ignore[assignment]
    guards._stop_if_weights_are_to_blame(Alarm("non_finite", 6, "The loss of step 6 is no number."))
    with pytest.raises(GuardStop, match="the loaded adapter: 'weight' contains NaN or Inf") as stopped:
        guards._stop_if_weights_are_to_blame(Alarm("non_finite", 5, "The loss of step 5 is no number."))
    assert "resume from the one before" in stopped.value.fix


def test_only_skipping_steps_makes_a_gpu_wait_for_the_norm(guards: Guards) -> None:
    class OnGpu:
        device = type("Device", (), {"type": "cuda"})()
        is_main, world_size, rank = True, 1, 0

    def waits(**settings: str) -> bool:
        section = GuardsSection.model_validate(settings)
        return Guards(section, guards.console, guards.events, OnGpu(), guards.health).waits  # type: ignore[arg-type]

    assert guards.waits  # a CPU has nothing to wait for
    assert not waits() and not waits(loss_spike="rollback", non_finite="rollback", grad_norm_spike="stop")
    assert waits(non_finite="skip-step") and waits(loss_spike="skip-step") and waits(grad_norm_spike="skip-step")
