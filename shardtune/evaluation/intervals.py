"""How sure is a number? 95 % intervals of shares, of ratios of sums over rows, and of paired differences. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardtune.report.noise import student_t

Z = 1.959963984540054  # the normal distribution's 97.5 % quantile
SEED = 0  # of the bootstrap and of samples of rows
RESAMPLES = 2000
_ROUNDING = 1e-12
_DRAWN_AT_ONCE = 1 << 22  # row numbers; 32 MB

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; None where it is not defined, or the data show no spread to judge it by."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


def wilson(hits: int, rows: int) -> Estimate:
    """A share with Wilson's score interval (without continuity correction), which holds at 0 % and 100 % too.

    Example:
        >>> wilson(10, 10)
        Estimate(value=1.0, low=0.7224..., high=1.0)
    """
    if not rows:
        return Estimate(None)
    share, z2 = hits / rows, Z * Z
    centre = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    half = Z * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows * rows)) / (1 + z2 / rows)
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == rows else min(1.0, centre + half)
    return Estimate(share, low, high)


def paired_shares(tuned: Sequence[bool], base: Sequence[bool]) -> Estimate:
    """The difference of two shares over the same rows, tuned − base, by Newcombe's method 10 (1998).

    Wilson's limits of both, squared and added, less what the rows' correlation takes away. Unlike a bootstrap it stays
    honest where all rows change alike.
    """
    rows = len(tuned)
    if not rows:
        return Estimate(None)
    both = sum(t and b for t, b in zip(tuned, base, strict=True))
    won = sum(t and not b for t, b in zip(tuned, base, strict=True))
    lost = sum(b and not t for t, b in zip(tuned, base, strict=True))
    neither = rows - both - won - lost
    first, second = wilson(both + won, rows), wilson(both + lost, rows)
    assert first.value is not None and first.low is not None and first.high is not None
    assert second.value is not None and second.low is not None and second.high is not None
    phi = _phi(both, won, lost, neither)
    difference = first.value - second.value
    below, above = first.value - first.low, second.high - second.value
    low = difference - math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    above, below = first.high - first.value, second.value - second.low
    high = difference + math.sqrt(max(0.0, above**2 - 2 * phi * above * below + below**2))
    return Estimate(difference, max(-1.0, low), min(1.0, high))


def _phi(both: int, won: int, lost: int, neither: int) -> float:
    """The correlation of both sides, corrected for continuity as Newcombe does."""
    margins = (both + won) * (lost + neither) * (both + lost) * (won + neither)
    if not margins:
        return 0.0
    product, half = both * neither - won * lost, (both + won + lost + neither) / 2
    corrected = max(product - half, 0.0) if product > 0 else float(product)
    return corrected / math.sqrt(margins)


def bootstrap(sums: Numbers, statistic: Callable[[Numbers], Numbers]) -> Estimate:
    """A statistic of sums over rows, with an interval from the percentiles of rows drawn again with replacement.

    A ratio of sums (loss per token) is resampled as such: rows bring their own weights. Draws depend on the number of
    rows alone, so that two statistics of the same rows see the same resamples.

    Args:
        sums: (rows, quantities), what each row contributes.
        statistic: From (n, quantities) totals to (n,) values; NaN where it is not defined.
    """
    if not len(sums):
        return Estimate(None)
    value = float(statistic(sums.sum(axis=0)[None])[0])
    if math.isnan(value):
        return Estimate(None)
    drawn = statistic(resampled(sums)) if len(sums) > 1 else np.empty(0)
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn) or np.ptp(drawn) <= _ROUNDING * abs(value):
        return Estimate(value)  # one row, or rows that say the same: resamples know no spread
    tail = _tail(len(sums))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def _tail(rows: int) -> float:
    """The share of resamples beyond each end: 2.5 % of many rows, less of few (Hesterberg's expanded percentiles).

    Resamples of few rows spread too little, by √((n−1)/n) and as the normal distribution does beside Student's t.
    """
    freedom = rows - 1
    wide = student_t(min(freedom, 1000))
    return math.erfc(math.sqrt(rows / freedom) * wide / math.sqrt(2)) / 2


def resampled(sums: Numbers) -> Numbers:
    """(resamples, quantities): totals over as many rows as there are, drawn with replacement."""
    rows = len(sums)
    generator = np.random.default_rng([SEED, rows])
    totals = np.empty((RESAMPLES, sums.shape[1]))
    step = max(1, _DRAWN_AT_ONCE // rows)
    for start in range(0, RESAMPLES, step):
        count = min(step, RESAMPLES - start)
        chosen = generator.integers(rows, size=(count, rows))
        chosen += rows * np.arange(count)[:, None]
        times = np.bincount(chosen.ravel(), minlength=count * rows).reshape(count, rows)
        totals[start : start + count] = times @ sums
    return totals


def mean_difference(tuned: Numbers, base: Numbers) -> Estimate:
    """The mean of differences row by row, with Student's interval; without one where all are the same."""
    differences = tuned - base
    if not len(differences):
        return Estimate(None)
    value = float(differences.mean())
    if len(differences) < 2 or np.ptp(differences) <= _ROUNDING * abs(value):
        return Estimate(value)
    half = student_t(min(len(differences) - 1, 1000)) * float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return Estimate(value, value - half, value + half)
