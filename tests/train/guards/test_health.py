"""Looks at ranks and machines: each kind of trouble is caused, named by rank and host, and told from what is ordinary."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardtune.config.schema import GuardsSection
from shardtune.parallel.processes import Processes
from shardtune.train.guards import health as health_module
from shardtune.train.guards.alarm import Alarm
from shardtune.train.guards.health import HealthChecks, RankHealth
from shardtune.train.guards.machine import Gpu
from shardtune.train.guards.numbers import drop_if_not_finite, exchange


class Ranks:
    """The health of several ranks, as if they had been exchanged: the last check of rank 0 is this process's own."""

    def __init__(self, processes: Processes, gpu: Gpu | None = None, **settings: Any) -> None:
        self.loop = SimpleNamespace(model=torch.nn.Linear(4, 4), paused_seconds=0.0, data_seconds=0.0)
        self.health = HealthChecks(GuardsSection(**settings), processes, gpu, every=1)
        self.health.attach(self.loop)  # type: ignore[arg-type]
        self.health.begin()
        self.step = 0

    def look(self, moving: bool = False, change: bool = True) -> list[Alarm]:
        self.step += 1
        if change:
            with torch.no_grad():
                self.loop.model.weight.add_(1e-3)
        self.health.begin_step(self.step)
        return self.health.end_step(self.step, moving)

    def among(self, paces: list[float], tokens: int = 1000) -> Alarm | None:
        """A look in which the ranks had these own seconds for so many tokens."""
        self.step += 1
        seen = [
            RankHealth(f"host{rank}", pace / tokens, tokens, None, 0.0, None, (), 0) for rank, pace in enumerate(paces)
        ]
        return self.health._straggler(self.step, seen)


def test_a_rank_has_to_be_the_slow_one_at_three_looks_in_a_row(processes: Processes) -> None:
    ranks = Ranks(processes)
    slow = [0.20, 0.20, 0.21, 0.30]
    assert ranks.among(slow) is None and ranks.among(slow) is None
    alarm = ranks.among(slow)
    assert alarm is not None and alarm.ranks == (3,) and "Rank 3 on host3 is slow" in alarm.text
    assert alarm.value == pytest.approx(1.5)
    other = Ranks(processes)
    turns = [slow, slow, slow[::-1], slow, slow, [0.2] * 4, slow, slow]
    assert [other.among(paces) for paces in turns] == [None] * 8


def test_milliseconds_and_small_differences_are_no_straggler(processes: Processes) -> None:
    assert [Ranks(processes).among([0.002, 0.009]) for _ in range(5)] == [None] * 5
    ranks = Ranks(processes)
    assert [ranks.among([0.002, 0.009]) for _ in range(5)] == [None] * 5
    assert [ranks.among([0.20, 0.25]) for _ in range(5)] == [None] * 5


def test_how_often_a_rank_was_slow_survives_a_checkpoint(processes: Processes) -> None:
    first, second = Ranks(processes), Ranks(processes)
    assert first.among([0.2, 0.4]) is None and first.among([0.2, 0.4]) is None
    second.health.restore(first.health.state())
    assert second.among([0.2, 0.4]) is not None


def test_a_gpu_that_is_nearly_full_is_told(processes: Processes) -> None:
    used = [70]
    ranks = Ranks(processes, Gpu(memory=lambda: (used[0], 100), throttle=tuple))
    assert ranks.look() == []
    used[0] = 97
    (alarm,) = ranks.look()
    assert (alarm.guard, alarm.value, alarm.limit, alarm.ranks) == ("memory", 0.97, 0.95, (0,))
    assert "peaked at 97.0%" in alarm.text and "train.per_device_train_batch_size" in alarm.fix
    assert Ranks(processes, Gpu(lambda: (97, 100), tuple), memory="off").look() == []


def test_a_gpu_that_slows_itself_down_is_told_with_the_reason(processes: Processes) -> None:
    reasons: list[str] = []
    ranks = Ranks(processes, Gpu(memory=lambda: (1, 100), throttle=lambda: reasons))
    assert ranks.look() == []
    reasons.append("hw_thermal_slowdown")
    (alarm,) = ranks.look()
    assert alarm.guard == "throttling" and "hw_thermal_slowdown" in alarm.text and alarm.ranks == (0,)


def test_waiting_for_data_is_a_share_of_the_time_without_pauses(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(health_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    ranks = Ranks(processes)
    assert ranks.look() == []  # the first step starts the loaders
    clock[0], ranks.loop.data_seconds = 10.0, 2.0
    assert ranks.look() == []  # 20 %
    clock[0], ranks.loop.data_seconds, ranks.loop.paused_seconds = 20.0, 4.0, 5.0
    (alarm,) = ranks.look()  # 2 of the 5 seconds that were not spent evaluating
    assert (alarm.guard, alarm.value) == ("data_starvation", pytest.approx(0.4))
    assert "spent 40% of the time waiting for data" in alarm.text


def test_adapters_that_stand_still_are_told_unless_nothing_should_move_them(processes: Processes) -> None:
    ranks = Ranks(processes)
    assert ranks.look(moving=True) == []  # nothing to compare with
    assert ranks.look(moving=True) == []
    assert ranks.look(moving=False, change=False) == []  # a learning rate of zero, or a step that was left out
    (alarm,) = ranks.look(moving=True, change=False)
    assert alarm.guard == "frozen_adapter" and "No adapter weight has changed" in alarm.text
    later = Ranks(processes)
    later.loop.model = ranks.loop.model
    later.health.restore(ranks.health.state())
    assert [a.guard for a in later.look(moving=True, change=False)] == ["frozen_adapter"]


@pytest.mark.parametrize("norm", [2.0, math.inf, math.nan])
def test_a_gradient_without_a_norm_becomes_zero(processes: Processes, norm: float) -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)]
    parameters[0].grad = torch.tensor([1.0, norm, -3.0])
    drop_if_not_finite(parameters, torch.tensor(norm))
    expected = [1.0, norm, -3.0] if math.isfinite(norm) else [0.0] * 3
    assert parameters[0].grad.tolist() == expected and parameters[1].grad is None


def test_a_steps_losses_are_summed_and_the_first_bad_micro_batch_is_found(processes: Processes) -> None:
    seen = exchange(3, [1.0, 0.5], torch.tensor(2.0), processes)
    assert (seen.loss, seen.bad) == (1.5, (-1,)) and seen.norm is not None and seen.norm.value() == 2.0
    assert exchange(3, [1.0, math.nan, math.inf], None, processes).bad == (1,)
