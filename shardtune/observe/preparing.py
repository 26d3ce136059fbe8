"""How far is the data preparation? A live bar with the time left on a terminal, a line every 10 s elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from shardtune.observe.progress_bar import Bar
from shardtune.terminal import clock, count

if TYPE_CHECKING:
    from shardtune.data.prepare import ProgressInfo

_SECONDS_BETWEEN_LINES = 10.0  # seconds: a log is read later, not watched
_LABELS = {
    "checking": "checking the data files",
    "waiting": "waiting for another process that is preparing the same data",
    "train": "training rows",
    "val": "validation rows",
}


class PreparingProgress(Bar):
    """Called with each ProgressInfo; a context manager, so that the bar always ends.

    Time left is estimated within a step: its seconds so far, times what remains over what is done.
    """

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, *, labels: Mapping[str, str] = _LABELS
    ) -> None:
        super().__init__(console)
        self.labels = {**_LABELS, **labels}
        self.console, self.clock = console, clock
        self._step = ""
        self._printed_at = float("-inf")

    def __call__(self, info: ProgressInfo) -> None:
        is_new, self._step = info.step != self._step, info.step
        if self.is_live:
            self.show(self.labels[info.step], info.share, 1.0 if info.rows else None, numbers(info))
        elif info.step == "waiting" and is_new:
            self._print(self.labels["waiting"])
        elif info.rows and (self.clock() - self._printed_at >= _SECONDS_BETWEEN_LINES or is_new):
            self._print(f"{self.labels[info.step]}: {numbers(info)}")

    def _print(self, line: str) -> None:
        self._printed_at = self.clock()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def numbers(info: ProgressInfo) -> str:
    """`25 %, 250 rows, 9,120 tokens, 25 rows/s, 0:30 left`."""
    parts = [f"{info.share:.0%}".replace("%", " %"), count(info.rows, "row"), f"{info.tokens:,} tokens"]
    if info.seconds >= 1:
        parts.append(f"{info.rows / info.seconds:,.0f} rows/s")
    if info.seconds >= 1 and info.seconds_left:
        parts.append(f"{clock(info.seconds_left)} left")
    return ", ".join(parts)
