"""How far is the evaluation? A bar with the time left on a terminal, a line every 10 s elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from shardtune.observe.progress_bar import Bar
from shardtune.terminal import clock

_SECONDS_BETWEEN_LINES = 10.0


class EvaluationProgress(Bar):
    """Parts come one after the other; time left is that of the part: its rows to go, at the pace of those done.

    The longest rows come first, so it is rather too much than too little.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self.console, self.now = console, now
        self._label, self._rows, self._began, self._printed = "", 0, 0.0, 0.0

    def begin(self, label: str, rows: int) -> None:
        self._label, self._rows = label, rows
        self._began = self._printed = self.now()
        self.show(label, 0, rows, f"0 of {rows:,} rows")

    def advance(self, done: int) -> None:
        """Args:
        done: Rows of this part that are finished.
        """
        now = self.now()
        left = (now - self._began) * (self._rows - done) / max(done, 1)
        numbers = f"{done:,} of {self._rows:,} rows, {clock(left)} left"
        if self.is_live:
            self.show(self._label, done, self._rows, numbers)
        elif now - self._printed >= _SECONDS_BETWEEN_LINES and done < self._rows:
            self._printed = now
            self.console.print(f"{self._label}: {numbers}", highlight=False, markup=False, soft_wrap=True)
