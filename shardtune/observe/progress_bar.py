"""How does a long task show progress? A bar that disappears when it is done, on a terminal only."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shardtune.terminal import size

_ECHO = 3  # columns


class NarrowProgress(Progress):
    """A progress line with room for the `^C` that a terminal echoes.

    On a full line the echo would wrap to the next one; rich would erase that one, and the bar would stay.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        return [_Narrow(renderable) for renderable in super().get_renderables()]


@dataclass(frozen=True)
class _Narrow:
    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(max(1, options.max_width - _ECHO)))


class Bar:
    """One line: label, bar, numbers. A context manager, so that it always ends.

    `is_live` is false on a quiet console and without a terminal (a log file); `show` then does nothing.
    """

    def __init__(self, console: Console) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._label = ""
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

    def show(self, label: str, done: float = 0, total: float | None = None, numbers: str = "") -> None:
        """A new label starts a new bar; with a total of None the bar is indeterminate."""
        if self._bar is None:
            return
        if self._task is None or label != self._label:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task, self._label = self._bar.add_task(label, total=None, numbers=""), label
        if total is not None:
            self._bar.update(self._task, completed=done, total=total, numbers=numbers)


class LoadingProgress(Bar):
    """Called with bytes read and bytes to read, from any thread."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.began = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        rate = size(done / max(time.monotonic() - self.began, 1e-9))
        self.show("reading weights", done, total, f"{size(done)} of {size(total)}, {rate}/s")
