"""Which numbers count, by step? Columns that keep the later attempt where steps were trained twice."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
# What a step did not report. Not NaN: that is a value a loss can have, and it must be visible.
ABSENT = -sys.float_info.max


class Columns:
    """Numbers by step, in order of steps. A repeated step discards everything from it on.

    Attributes:
        undone_parts: (steps, columns) of each part that a restart or a rollback has undone, if they are kept.
        undone: How many steps were undone in total.
    """

    def __init__(self, *, keep_undone: bool = False) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.undone_parts: list[dict[str, tuple[Numbers, Numbers]]] = []
        self.undone = 0
        self._values: dict[str, array[float]] = {}
        self._keep_undone = keep_undone

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    def add(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if self.steps and step <= self.steps[-1]:
            self.rewind(step - 1)
        for name in values.keys() - self._values.keys():
            self._values[name] = array("d", [ABSENT]) * len(self.steps)
        self.steps.append(step)
        self.times.append(time)
        for name, column in self._values.items():
            column.append(values.get(name, ABSENT))

    def rewind(self, step: int) -> None:
        """Everything after `step` no longer counts."""
        at = bisect_right(self.steps, step)
        if at == len(self.steps):
            return
        self.undone += len(self.steps) - at
        if self._keep_undone:
            kept = {name: self.get(name, begin=at) for name in self._values}
            self.undone_parts.append({name: (x.copy(), y.copy()) for name, (x, y) in kept.items()})
        del self.steps[at:], self.times[at:]
        for column in self._values.values():
            del column[at:]

    def get(self, name: str, *, begin: int = 0) -> tuple[Numbers, Numbers]:
        """Steps and values of one column, where it has any."""
        if name not in self._values:
            return np.empty(0), np.empty(0)
        # Copies: an array cannot grow while a buffer of it is exported.
        steps = np.array(self.steps[begin:], dtype=np.float64)
        values = np.array(self._values[name][begin:], dtype=np.float64)
        there = values != ABSENT
        return steps[there], values[there]

    def last(self, name: str) -> float | None:
        _, values = self.get(name)
        return float(values[-1]) if len(values) else None

    def time_of(self, step: int) -> float | None:
        at = bisect_right(self.steps, step) - 1
        return self.times[at] if at >= 0 else None


def together(found: Mapping[int, tuple[Numbers, Numbers]]) -> tuple[Numbers, np.ndarray]:
    """The steps that all ranks have, and a row of values for each rank."""
    steps = next(iter(found.values()))[0]
    for x, _ in found.values():
        steps = np.intersect1d(steps, x, assume_unique=True)
    return steps, np.array([y[np.searchsorted(x, steps)] for x, y in found.values()])
