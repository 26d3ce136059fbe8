"""Medians and deviations: what is a spike, what diverges, what never fell; and what is only an ordinary curve."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from shardtune.config.schema import GuardsSection
from shardtune.train.guards.alarm import Alarm
from shardtune.train.guards.curve import Curve


def judged(curve: Curve, losses: list[float], norms: list[float] | None = None, first: int = 1) -> list[Alarm]:
    """As a run with `warn` everywhere judges: every step is accepted."""
    found = []
    for step, loss in enumerate(losses, first):
        norm = norms[step - first] if norms else 1.0
        found += [alarm for alarm in (curve.spike(step, loss, norm),) if alarm]
        curve.accept(step, loss, norm)
        found += [alarm for alarm in (curve.trend(step),) if alarm]
    return found


def ordinary(steps: int, seed: int, begin: float = 3.0, end: float = 1.2, noise: float = 0.2) -> list[float]:
    """A falling loss with the noise of small batches: log-normal, so that single batches stand out."""
    rng = random.Random(seed)
    return [(end + (begin - end) * math.exp(-4 * n / steps)) * rng.lognormvariate(0, noise) for n in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_curves_raise_no_alarm(seed: int) -> None:
    losses = ordinary(1000, seed)
    norms = ordinary(1000, seed + 100, begin=2.0, end=0.5, noise=0.5)
    assert judged(Curve(GuardsSection()), losses, norms) == []


@pytest.mark.parametrize(("begin", "end"), [(0.9, 0.01), (4.0, 0.05)])
def test_memorising_down_to_next_to_nothing_raises_no_alarm(begin: float, end: float) -> None:
    losses = ordinary(600, 1, begin=begin, end=end)
    assert judged(Curve(GuardsSection()), losses, [loss / 3 for loss in losses]) == []


def test_a_loss_spike_is_seen_with_its_size() -> None:
    curve = Curve(GuardsSection())
    (alarm,) = judged(curve, [*ordinary(100, 3), 12.0])
    assert (alarm.guard, alarm.step, alarm.value) == ("loss_spike", 101, 12.0)
    assert alarm.limit is not None and 1.8 < alarm.limit < 12
    assert "times the median of the preceding steps" in alarm.text


def test_a_gradient_spike_is_seen_when_the_loss_is_ordinary() -> None:
    alarms = judged(Curve(GuardsSection()), [2.0 + 0.1 * (n % 5) for n in range(60)], [1.0] * 59 + [30.0])
    assert [(alarm.guard, alarm.step) for alarm in alarms] == [("grad_norm_spike", 60)]


def test_nothing_is_judged_before_half_a_window_is_known() -> None:
    assert judged(Curve(GuardsSection()), [2.0] * 24 + [50.0]) == []
    assert len(judged(Curve(GuardsSection()), [2.0] * 25 + [50.0])) == 1


def test_a_loss_that_rises_and_stays_up_diverges_from_its_first_bad_step_on() -> None:
    curve = Curve(GuardsSection(loss_spike="off", window=20))
    losses = ordinary(100, 4, noise=0.05) + [5.0] * 15
    alarms = [alarm for alarm in judged(curve, losses) if alarm.guard == "divergence"]
    assert alarms[0].first_step == 101
    assert 109 <= alarms[0].step <= 112
    assert judged(Curve(GuardsSection(loss_spike="off", divergence="off", window=20)), losses) == []


def test_one_spike_is_no_divergence() -> None:
    losses = ordinary(100, 4, noise=0.05)
    losses[60:63] = [9.0] * 3
    assert {alarm.guard for alarm in judged(Curve(GuardsSection(window=20)), losses)} == {"loss_spike"}


def test_a_loss_that_never_fell_is_told() -> None:
    rng = random.Random(0)
    flat = [2.5 + rng.uniform(-0.1, 0.1) for _ in range(450)]
    (alarm, *_) = judged(Curve(GuardsSection()), flat)
    assert alarm.guard == "flat_loss" and 200 <= alarm.step <= 400
    assert judged(Curve(GuardsSection(flat_loss="off")), flat) == []
    assert judged(Curve(GuardsSection()), [loss - 0.001 * n for n, loss in enumerate(flat)]) == []


@pytest.mark.parametrize("cut", [3, 27, 60, 119])
def test_a_curve_that_went_through_json_judges_the_same(cut: int) -> None:
    settings: dict[str, Any] = {"window": 20, "flat_loss_steps": 40}
    losses = [*ordinary(100, 7, begin=1.0, end=1.0), *([9.0] * 20)]
    whole = judged(Curve(GuardsSection(**settings)), losses)
    assert {alarm.guard for alarm in whole} == {"loss_spike", "divergence", "flat_loss"}
    first = Curve(GuardsSection(**settings))
    found = judged(first, losses[:cut])
    second = Curve(GuardsSection(**settings))
    second.restore(json.loads(json.dumps(first.state())))
    assert found + judged(second, losses[cut:], first=cut + 1) == whole


def test_a_rise_that_is_small_or_stays_below_the_beginning_is_no_divergence() -> None:
    settings: dict[str, Any] = {"window": 10, "loss_spike": "off"}
    small = [0.5 - 0.012 * n for n in range(41)] + [0.1] * 20  # five times the best, and a tenth of a nat
    assert judged(Curve(GuardsSection(**settings)), small) == []
    below = [4.0 - 0.1 * n for n in range(35)] + [2.0] * 20  # of a curriculum that grows harder
    assert judged(Curve(GuardsSection(**settings)), below) == []
    above = [4.0 - 0.1 * n for n in range(35)] + [4.2] * 20
    assert {alarm.guard for alarm in judged(Curve(GuardsSection(**settings)), above)} == {"divergence"}
