"""How are a hundred thousand points drawn? Minimum and maximum of each bucket, and values that are NaN or infinite.

A mean would hide the one step that matters, and every n-th point would miss it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardtune.report.columns import Numbers


@dataclass(frozen=True)
class Curve:
    """The points of a series that are drawn.

    Args:
        y: None where the value is not finite: a gap.
        of: How many points there were.
        broken: (step, "nan" | "inf" | "-inf"), the first of each bucket that has one.
        breaks: How many values were not finite in total.
    """

    x: list[float]
    y: list[float | None]
    of: int
    broken: list[tuple[float, str]]
    breaks: int

    @property
    def is_downsampled(self) -> bool:
        return len(self.x) < self.of


def downsample(x: Numbers, y: Numbers, buckets: int) -> Curve:
    """At most about `3 * buckets` points: minimum, maximum and the first non-finite value of each bucket."""
    finite = np.isfinite(y)
    if len(x) <= 2 * buckets:
        chosen = np.arange(len(x))
        broken = np.flatnonzero(~finite)[:buckets]
    else:
        chosen, broken = _extremes(y, finite, buckets)
    return Curve(
        x=[_plain(value) for value in x[chosen]],
        y=[_rounded(float(y[i])) if finite[i] else None for i in chosen],
        of=len(x),
        broken=[(_plain(x[i]), _word(float(y[i]))) for i in broken],
        breaks=int((~finite).sum()),
    )


def _extremes(y: Numbers, finite: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    edges = np.linspace(0, len(y), buckets + 1).astype(int)
    chosen, broken = {0, len(y) - 1}, []
    for begin, end in pairwise(edges):
        here, sound = y[begin:end], finite[begin:end]
        if sound.all():
            chosen.update((begin + int(here.argmin()), begin + int(here.argmax())))
            continue
        first = begin + int((~sound).argmax())
        chosen.add(first)
        broken.append(first)
        if sound.any():
            chosen.add(begin + int(np.where(sound, here, np.inf).argmin()))
            chosen.add(begin + int(np.where(sound, here, -np.inf).argmax()))
    return np.array(sorted(chosen)), np.array(broken, dtype=int)


def means(x: Numbers, columns: dict[str, Numbers], buckets: int) -> tuple[list[float], dict[str, list[float | None]]]:
    """Means of buckets, for stacked charts: only means add up to a mean. x is the last step of each bucket."""
    edges = np.unique(np.linspace(0, len(x), (len(x) if len(x) <= 2 * buckets else buckets) + 1).astype(int))
    pairs = list(pairwise(edges))
    found: dict[str, list[float | None]] = {}
    for name, values in columns.items():
        sums = [float(values[begin:end].mean()) for begin, end in pairs]
        found[name] = [_rounded(value) if np.isfinite(value) else None for value in sums]
    return [_plain(x[end - 1]) for _, end in pairs], found


def _plain(value: float) -> float:
    return int(value) if value == int(value) else float(value)


def _rounded(value: float) -> float:
    """Six significant digits: more than a screen shows, and half the bytes."""
    return float(f"{value:.6g}")


def _word(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"
