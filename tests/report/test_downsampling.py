"""Drawing few points for many without hiding any extreme."""

from __future__ import annotations

import math
import random

import numpy as np

from shardtune.report.downsampling import downsample, means


def test_an_extreme_at_any_step_is_drawn() -> None:
    chance = random.Random(3)
    for _ in range(20):
        values = np.sin(np.arange(50_000) / 500)
        high, low = chance.sample(range(50_000), 2)
        values[high], values[low] = 77.0, -77.0
        curve = downsample(np.arange(50_000.0), values, 300)
        assert (high, 77.0) in zip(curve.x, curve.y, strict=True)
        assert (low, -77.0) in zip(curve.x, curve.y, strict=True)
        assert len(curve.x) <= 602 and curve.of == 50_000


def test_what_is_no_number_stays_visible_between_those_that_are() -> None:
    values = np.ones(10_000)
    values[4321], values[7000:7100] = math.nan, math.inf
    curve = downsample(np.arange(10_000.0), values, 100)
    assert (4321, "nan") in curve.broken and any(word == "inf" for _, word in curve.broken)
    assert curve.y[curve.x.index(4321)] is None, "the curve has a gap there"
    assert curve.breaks == 101


def test_few_points_are_all_drawn_in_order() -> None:
    curve = downsample(np.array([1.0, 2.0, 5.0]), np.array([3.0, math.nan, 4.0]), 100)
    assert curve.x == [1, 2, 5] and curve.y == [3.0, None, 4.0] and not curve.is_downsampled


def test_the_ends_are_drawn_and_steps_rise() -> None:
    curve = downsample(np.arange(5000.0), np.ones(5000), 50)
    assert curve.x[0] == 0 and curve.x[-1] == 4999 and curve.x == sorted(set(curve.x))


def test_stacked_means_add_up_to_the_mean() -> None:
    a, b = np.arange(1000.0), np.arange(1000.0)[::-1]
    x, found = means(np.arange(1, 1001.0), {"a": a, "b": b}, 10)
    assert len(x) == 10 and x[-1] == 1000
    assert all(abs(p + q - 999) < 0.01 for p, q in zip(found["a"], found["b"], strict=True))  # type: ignore[operator]
