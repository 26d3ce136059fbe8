"""How does a long step show that it goes on? A bar that vanishes when it is over, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_ECHO = 3  # columns


class NarrowProgress(Progress):
    """A progress line with room behind it for the `^C` that a terminal echoes.

    On a line that is full the echo begins the next one; that one would be erased instead, and the bar stay for good.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        return [_Narrow(renderable) for renderable in super().get_renderables()]


@dataclass(frozen=True)
class _Narrow:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(max(1, options.max_width - _ECHO)))


class Bar:
    """One line: what is done, how far, numbers. A context manager, so that it ends whatever happens.

    `is_live` is false on a quiet console and where nobody watches (a log file); `show` then does nothing.
    """

    def __init__(self, console: Console) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._words = ""
        if console.is_terminal and not console.quiet:
            self._bar = NarrowProgress(
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
