"""How does a long step show that it goes on? A bar that vanishes when it is over, on a terminal only."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class Bar:
    """One line: what is done, how far, numbers. A context manager, so that it ends whatever happens.

    `is_live` is false on a quiet console and where nobody watches (a log file); `show` then does nothing.
    """

    def __init__(self, console: Console) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._words = ""
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                console=console,
                expand=True,
                transient=True,
            )

    @property
    def is_live(self) -> bool:
        return self._bar is not None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, words: str, done: float = 0, total: float | None = None, numbers: str = "") -> None:
        """Other words begin a new bar; a total of None moves without saying how far."""
        if self._bar is None:
            return
        if self._task is None or words != self._words:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task, self._words = self._bar.add_task(words, total=None, numbers=""), words
        if total is not None:
            self._bar.update(self._task, completed=done, total=total, numbers=numbers)
