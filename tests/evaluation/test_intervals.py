"""Intervals are those of the literature, and hold the truth about as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from shardtune.evaluation import intervals
from shardtune.evaluation.intervals import Estimate, bootstrap, mean_difference, paired_shares, wilson


@pytest.mark.parametrize(
    ("hits", "rows", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_the_paper(hits: int, rows: int, low: float, high: float) -> None:
    found = wilson(hits, rows)
    assert found.value == hits / rows
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_no_rows_have_no_share() -> None:
    assert wilson(0, 0) == Estimate(None)
    assert paired_shares([], []) == Estimate(None)


def pairs(both: int, won: int, lost: int, neither: int) -> tuple[list[bool], list[bool]]:
    tuned = [True] * (both + won) + [False] * (lost + neither)
    base = [True] * both + [False] * won + [True] * lost + [False] * neither
    return tuned, base


def test_the_paired_interval_is_newcombes_tenth_method() -> None:
    # Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired
    # data", table II.
    found = paired_shares(*pairs(36, 12, 2, 0))
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == (pytest.approx(0.0569, abs=5e-5), pytest.approx(0.3404, abs=5e-5))


def test_rows_that_all_change_alike_still_leave_doubt() -> None:
    found = paired_shares([True] * 20, [False] * 20)
    assert found.value == 1 and found.low is not None and 0.7 < found.low < 0.85 and found.high == 1


def test_swapping_the_sides_turns_the_interval_round() -> None:
    tuned, base = pairs(30, 9, 4, 17)
    one, other = paired_shares(tuned, base), paired_shares(base, tuned)
    assert one.low is not None and other.high is not None
    assert one.low == pytest.approx(-other.high)


def ratio(totals: np.ndarray) -> np.ndarray:
    return totals[:, 0] / totals[:, 1]


def test_a_bootstrap_weighs_rows_by_their_tokens() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 50, size=400)
    losses = tokens * rng.normal(2.0, 0.5, size=400)
    found = bootstrap(np.column_stack([losses, tokens]), ratio)
    mean = losses.sum() / tokens.sum()
    # The delta method's standard error of a ratio.
    error = np.sqrt(((losses - mean * tokens) ** 2).sum()) / tokens.sum()
    assert found.value == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.15 * error)


def test_a_bootstrap_says_the_same_each_time_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.random.default_rng(1).random((30, 2))
    first = bootstrap(sums, ratio)
    assert bootstrap(sums, ratio) == first
    resamples = intervals.resampled(sums)
    monkeypatch.setattr(intervals, "_DRAWN_AT_ONCE", 30 * 7)
    assert np.allclose(intervals.resampled(sums).mean(axis=0), resamples.mean(axis=0), rtol=0.02)
    assert np.isclose(resamples.mean(axis=0), sums.sum(axis=0), rtol=0.02).all()


@pytest.mark.parametrize("sums", [[[2.0, 1.0]], [[2.0, 1.0]] * 9, [[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]]])
def test_rows_that_say_the_same_have_no_bootstrap_interval(sums: list[list[float]]) -> None:
    found = bootstrap(np.array(sums), ratio)
    assert found.value is not None and found.low is None and found.high is None


@pytest.mark.parametrize("rows", [8, 60])
def test_about_nineteen_of_twenty_bootstrap_intervals_hold_the_truth(rows: int) -> None:
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(200):
        tokens = rng.integers(1, 20, size=rows)
        found = bootstrap(np.column_stack([tokens * rng.normal(1.0, 0.5, size=rows), tokens]), ratio)
        assert found.low is not None and found.high is not None
        held += found.low <= 1.0 <= found.high
    assert 180 <= held <= 199  # plain percentiles of 8 rows hold it in 172


def test_a_mean_of_differences_has_students_interval() -> None:
    found = mean_difference(np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 0.0]))
    assert found.value == 2 and found.low == pytest.approx(2 - 4.302653 / np.sqrt(3))
    assert mean_difference(np.array([1.0]), np.array([0.5])) == Estimate(0.5)
    assert mean_difference(np.array([1.0, 2.0]), np.array([0.5, 1.5])) == Estimate(0.5)  # no spread to judge it by
