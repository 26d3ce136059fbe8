"""How far are the weights? A bar with GB/s on a terminal, one line when they are there."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shardtune.observe.summary import size


class LoadingProgress:
    """Called with bytes read and bytes to read, from any thread; a context manager, so that the bar ends."""

    def __init__(self, console: Console) -> None:
        self.began = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("reading weights"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                console=console,
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, numbers="")

    def __enter__(self) -> LoadingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            numbers = f"{size(done)} of {size(total)}, {rate(done, time.monotonic() - self.began)}"
            self._bar.update(self._task, completed=done, total=total, numbers=numbers)


def rate(done: int, seconds: float) -> str:
    """`1.25 GB/s`."""
    return f"{size(done / max(seconds, 1e-9))}/s"
