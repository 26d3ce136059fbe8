"""How much of an eval loss, or of the difference between two, is chance? From the means of groups of its rows.

An evaluation is a mean per token over N rows: another N rows of the same kind would give another number. Rows fall
into at most 32 groups, the same ones in every evaluation of a run (`groups` in its `eval` events). Their spread
estimates that chance, whatever the rows' lengths, and although the tokens of a row depend on each other.

For a mean L = Σ s_g / Σ n_g over G groups (s: summed loss, n: tokens) the standard error is that of a ratio:
√( G/(G−1) · Σ (s_g − L·n_g)² ) / Σ n_g. An interval is ± t · standard error, with Student's t for 95 % and G−1 degrees
of freedom. For the difference of two evaluations of the same rows it is taken of the groups' differences: a row that
is hard for one checkpoint is hard for the other, so that a difference is known far better than either of the two.

What it leaves out: another seed, another order of the training rows. That is the spread of whole runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95 %, for 1 … 31 degrees of freedom.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 2.040,
)  # fmt: skip


@dataclass(frozen=True)
class Groups:
    """Tokens of each group, and each group's mean of one metric per token."""

    tokens: tuple[int, ...]
    means: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """Of two evaluations, with half the width of its 95 % interval; `paired`: taken group by group."""

    value: float
    interval: float
    paired: bool

    @property
    def is_within_noise(self) -> bool:
        return abs(self.value) <= self.interval


def interval_of(groups: Groups | None) -> float | None:
    """Half the width of the 95 % interval of a mean; None where it cannot be estimated: fewer than two groups."""
    return _interval(groups.tokens, groups.means) if groups is not None else None


def difference(value: float, groups: Groups | None, other: float, others: Groups | None) -> Difference | None:
    """`value` − `other`; None where the noise of either is not known."""
    if groups is None or others is None:
        return None
    if groups.tokens == others.tokens:
        found = _interval(groups.tokens, [a - b for a, b in zip(groups.means, others.means, strict=True)])
        return Difference(value - other, found, paired=True) if found is not None else None
    mine, theirs = interval_of(groups), interval_of(others)
    if mine is None or theirs is None:
        return None
    return Difference(value - other, math.hypot(mine, theirs), paired=False)


def _interval(tokens: Sequence[int], means: Sequence[float]) -> float | None:
    number, total = len(tokens), sum(tokens)
    if number < 2 or not all(map(math.isfinite, means)):
        return None
    mean = sum(n * m for n, m in zip(tokens, means, strict=True)) / total
    squares = sum((n * (m - mean)) ** 2 for n, m in zip(tokens, means, strict=True))
    standard_error = math.sqrt(number / (number - 1) * squares) / total
    return STUDENT_T[min(number - 1, len(STUDENT_T)) - 1] * standard_error
