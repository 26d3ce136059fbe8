"""How far are the weights? A bar with the rate on a terminal."""

from __future__ import annotations

import time

from rich.console import Console

from shardtune.observe.bar import Bar
from shardtune.terminal import size


class LoadingProgress(Bar):
    """Called with bytes read and bytes to read, from any thread."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.began = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        rate = size(done / max(time.monotonic() - self.began, 1e-9))
        self.show("reading weights", done, total, f"{size(done)} of {size(total)}, {rate}/s")
