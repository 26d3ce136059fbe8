"""Which numbers did a script log (`observe.log`)? One series for each name, whatever a name means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardtune.report.columns import Columns, Numbers

_MOST = 200  # names; a script that puts the step into its names must not use up the reader's memory
_VALIDATION = re.compile(r"(val|valid|validation|eval|evaluation|test)[/_.-]", re.IGNORECASE)
_VALUE = "value"

Point = tuple[int, float]


@dataclass(frozen=True)
class Metric:
    """One metric. Whether more is better is not known, so it has both ends.

    Args:
        rank: That logged it.
        lowest: The first step with it; None: no value is finite.
    """

    name: str
    rank: int
    x: Numbers
    y: Numbers
    lowest: Point | None
    highest: Point | None

    @property
    def first(self) -> Point:
        return int(self.x[0]), float(self.y[0])

    @property
    def last(self) -> Point:
        return int(self.x[-1]), float(self.y[-1])


class Metrics:
    """Series by rank and name. A step that is done again counts once, as the later attempt logged it.

    Attributes:
        replaced: Values of a step that logged the same name again.
        left_out: Names beyond the most that are kept.
    """

    def __init__(self) -> None:
        self.replaced = 0
        self.left_out: set[str] = set()
        self.last_time: float | None = None
        self._series: dict[int, dict[str, Columns]] = {}
        self._at: dict[int, int] = {}

    @property
    def last_step(self) -> int:
        return max(self._at.values(), default=0)

    def add(self, rank: int, step: int, time: float, values: Mapping[str, float]) -> None:
        if step < self._at.get(rank, 0):  # started again without resuming: all of the first attempt is undone
            self.rewind(rank, step - 1)
        self._at[rank], self.last_time = step, time
        series = self._series.setdefault(rank, {})
        for name, value in values.items():
            if name not in series and len(series) >= _MOST:
                if len(self.left_out) < _MOST:
                    self.left_out.add(name)
                continue
            columns = series.setdefault(name, Columns())
            self.replaced += bool(len(columns)) and columns.last_step == step
            columns.add(step, time, {_VALUE: value})

    def rewind(self, rank: int, step: int) -> None:
        """Everything of this rank after `step` no longer counts."""
        for columns in self._series.get(rank, {}).values():
            columns.rewind(step)
        self._at[rank] = min(step, self._at.get(rank, step))

    def all(self) -> list[Metric]:
        """In the order they were first logged; of a name that several ranks log, the lowest rank's."""
        found: dict[str, Metric] = {}
        for rank, series in sorted(self._series.items()):
            for name, columns in series.items():
                if len(columns) and name not in found:
                    found[name] = _metric(name, rank, columns)
        return list(found.values())

    def times(self) -> tuple[Numbers, Numbers]:
        """Steps, and when they were logged: of the name with the most values."""
        columns = max((c for series in self._series.values() for c in series.values()), key=len, default=Columns())
        return np.array(columns.steps, dtype=np.float64), np.array(columns.times, dtype=np.float64)


def _metric(name: str, rank: int, columns: Columns) -> Metric:
    x, y = columns.get(_VALUE)
    finite = np.isfinite(y)
    ends: list[Point | None] = [None, None]
    if finite.any():
        at = int(np.where(finite, y, np.inf).argmin()), int(np.where(finite, y, -np.inf).argmax())
        ends = [(int(x[i]), float(y[i])) for i in at]
    return Metric(name, rank, x, y, ends[0], ends[1])


def main_metric(values: Mapping[str, float]) -> str | None:
    """The name by which a list shows a run: a validation metric, or else the loss, or what was logged first."""
    named = [name for name in values if _VALIDATION.match(name)]
    return next(iter([*named, *(name for name in values if name == "loss"), *values]), None)
