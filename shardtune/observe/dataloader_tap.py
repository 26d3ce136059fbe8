"""How long does the loop wait for batches, and what is in them? Patches torch's DataLoader iterator.

A Trainer replaces its loader (accelerate wraps it, a resumed epoch gets another), so there is no one object to wrap.
All of them use torch's iterator class; its `__next__` is patched during training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from shardtune.observe.clocks import Clock, Mark

Fetched = Callable[[object, Mark, Mark], None]


class DataLoaderTap:
    """Calls `fetching()` before and `fetched(batch, begin, end)` after each batch of `dataset` that a loader returns.

    `is_open` is False where torch has no such iterator class (a private name); then nothing is ever called.
    """

    def __init__(self, dataset: object, clock: Clock, fetching: Callable[[], None], fetched: Fetched) -> None:
        self.dataset, self.clock, self.fetching, self.fetched = dataset, clock, fetching, fetched
        self._class = _iterator_class()
        self._was: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    @property
    def is_open(self) -> bool:
        return self._was is not None

    def open(self) -> None:
        if self._class is None or self.is_open or self.dataset is None:
            return
        was = self._class.__next__
        tap = self

        def hand_out(iterator: Any) -> Any:
            if getattr(iterator, "_dataset", None) is not tap.dataset:
                return was(iterator)
            tap.fetching()
            begin = tap.clock.mark()
            batch = was(iterator)
            tap.fetched(batch, begin, tap.clock.mark())
            return batch

        self._was, self._ours = was, hand_out
        self._class.__next__ = hand_out

    def close(self) -> None:
        if self._was is not None:
            if self._class.__next__ is self._ours:  # otherwise it was patched again after us, and still calls ours
                self._class.__next__ = self._was
            else:
                self.dataset = None
            self._was = None


def _iterator_class() -> Any:
    return getattr(dataloader, "_BaseDataLoaderIter", None)
