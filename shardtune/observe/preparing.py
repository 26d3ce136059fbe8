"""How far is preparing the data? A live bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

if TYPE_CHECKING:
    from shardtune.data.prepare import ProgressInfo

_BETWEEN_LINES = 10.0  # seconds: a log is read later, not watched
_WORDS = {
    "checking": "looking at the data files",
    "waiting": "waiting for another process that prepares the same data",
    "train": "training rows",
    "val": "validation rows",
}


class PreparingProgress:
    """Called with each ProgressInfo; a context manager, so that the bar ends whatever happens.

    Time left is counted within a step: the seconds it took so far, times what remains over what is read.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self._step = ""
        self._spoke = float("-inf")
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> PreparingProgress:
        if self.console.is_terminal and not self.console.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
                expand=True,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, info: ProgressInfo) -> None:
        is_new, self._step = info.step != self._step, info.step
        if self._bar is not None:
            self._show(self._bar, info, is_new=is_new)
        elif info.step == "waiting" and is_new:
            self._say(_WORDS["waiting"])
        elif info.rows and (self.clock() - self._spoke >= _BETWEEN_LINES or is_new):
            self._say(f"{_WORDS[info.step]}: {numbers(info)}")

    def _show(self, bar: Progress, info: ProgressInfo, *, is_new: bool) -> None:
        if is_new or self._task is None:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(_WORDS[info.step], total=None, numbers="")
        if info.rows:
            bar.update(self._task, completed=info.share, total=1.0, numbers=numbers(info))

    def _say(self, line: str) -> None:
        self._spoke = self.clock()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def numbers(info: ProgressInfo) -> str:
    """`25 %, 250 rows, 9,120 tokens, 25 rows/s, 0:30 left`."""
    parts = [f"{info.share:.0%}".replace("%", " %"), f"{info.rows:,} rows", f"{info.tokens:,} tokens"]
    if info.seconds >= 1:
        parts.append(f"{info.rows / info.seconds:,.0f} rows/s")
    if info.seconds >= 1 and info.seconds_left:
        parts.append(f"{_clock(info.seconds_left)} left")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    # As observe.progress.clock, which imports transformers.
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
