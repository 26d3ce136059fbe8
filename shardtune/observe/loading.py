"""How far are the weights? A bar with GB/s on a terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console

from shardtune.observe.bar import Bar
from shardtune.observe.summary import size


class LoadingProgress:
    """Called with bytes read and bytes to read, from any thread."""

    def __init__(self, console: Console) -> None:
        self.began = time.monotonic()
        self._bar = Bar(console)

    def __enter__(self) -> LoadingProgress:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def __call__(self, done: int, total: int) -> None:
        rate = size(done / max(time.monotonic() - self.began, 1e-9))
        self._bar.show("reading weights", done, total, f"{size(done)} of {size(total)}, {rate}/s")
