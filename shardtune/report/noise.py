"""How much of an eval loss, or of the difference between two, is chance? From the means of groups of its rows.

An evaluation is a mean per token over N rows: another N rows of the same kind would give another number. Rows fall
into at most 32 groups, the same ones in every evaluation of a run (`groups` in its `eval` events). Their spread
estimates that chance, whatever the rows' lengths, and although the tokens of a row depend on each other.

For a mean L = Σ s_g / Σ n_g over G groups (s: summed loss, n: tokens) the standard error is that of a ratio:
√( G/(G−1) · Σ (s_g − L·n_g)² ) / Σ n_g. An interval is ± t · standard error, with Student's t for 95 % and G−1 degrees
of freedom. For the difference of two evaluations of the same rows it is taken of the groups' differences: a row that
is hard for one checkpoint is hard for the other, so that a difference is known far better than either of the two.

The best of K evaluations is also the luckiest: of equal checkpoints the last lies beyond a plain 95 % interval from the
best in 17 % of runs with twenty evaluations, in 40 % of those with a hundred. Differences from it are K−1 comparisons,
and t is that of 5 % / (K−1) (Bonferroni), so that all of them hold together in 95 of 100 runs.

What it leaves out: another seed, another order of the training rows. That is the spread of whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Groups:
    """Tokens of each group, and each group's mean of one metric per token."""

    tokens: tuple[int, ...]
    means: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """Of two evaluations, with half the width of its interval; `paired`: taken group by group."""

    value: float
    interval: float
    paired: bool

    @property
    def is_within_noise(self) -> bool:
        return abs(self.value) <= self.interval


def interval_of(groups: Groups | None) -> float | None:
    """Half the width of the 95 % interval of a mean; None where it cannot be estimated: fewer than two groups."""
    return _interval(groups.tokens, groups.means) if groups is not None else None


def difference(
    value: float, groups: Groups | None, other: float, others: Groups | None, comparisons: int = 1
) -> Difference | None:
    """`value` − `other`; None where the noise of either is not known.

    Args:
        comparisons: How many are made; their intervals hold all together at 95 %.
    """
    if groups is None or others is None:
        return None
    if groups.tokens == others.tokens:
        between = [a - b for a, b in zip(groups.means, others.means, strict=True)]
        found = _interval(groups.tokens, between, comparisons)
        return Difference(value - other, found, paired=True) if found is not None else None
    mine, theirs = (_interval(each.tokens, each.means, comparisons) for each in (groups, others))
    if mine is None or theirs is None:
        return None
    return Difference(value - other, math.hypot(mine, theirs), paired=False)


def _interval(tokens: Sequence[int], means: Sequence[float], comparisons: int = 1) -> float | None:
    number, total = len(tokens), sum(tokens)
    if number < 2 or not all(map(math.isfinite, means)):
        return None
    mean = sum(n * m for n, m in zip(tokens, means, strict=True)) / total
    squares = sum((n * (m - mean)) ** 2 for n, m in zip(tokens, means, strict=True))
    standard_error = math.sqrt(number / (number - 1) * squares) / total
    return student_t(number - 1, 0.05 / comparisons) * standard_error


@lru_cache(maxsize=1024)
def student_t(freedom: int, outside: float = 0.05) -> float:
    """Half the width, in standard errors, of the interval that leaves `outside` of Student's distribution, both sides.

    Example:
        >>> round(student_t(31), 3)
        2.04
    """
    low, high = 0.0, math.pi / 2  # the arc whose tangent is t / √freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - _share_within(middle, freedom) > outside else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _share_within(arc: float, freedom: int) -> float:
    """Of Student's distribution between −t and t: Abramowitz & Stegun 26.7.3 and 26.7.4."""
    cosine, odd = math.cos(arc), freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (arc + math.sin(arc) * total) if odd else math.sin(arc) * total
