"""When did the device reach a point? Events in its stream, read once they have passed, without synchronizing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

Mark = Any  # seconds on a host clock, or a CUDA event


class Clock(Protocol):
    """Sets marks now; gives the seconds between two of them when both have passed."""

    def mark(self) -> Mark: ...

    def is_passed(self, mark: Mark) -> bool: ...

    def wait_for(self, mark: Mark) -> None: ...

    def seconds(self, begin: Mark, end: Mark) -> float: ...

    def recycle(self, marks: Iterable[Mark]) -> None: ...


class HostClock:
    """For devices that compute while the process waits: the CPU."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def is_passed(self, mark: Mark) -> bool:
        return True

    def wait_for(self, mark: Mark) -> None:
        return

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)

    def recycle(self, marks: Iterable[Mark]) -> None:
        return


class CudaClock:
    """Events in the stream that is current when a mark is set. They are reused, since creating one is expensive."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def wait_for(self, mark: Mark) -> None:
        mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end)) / 1000

    def recycle(self, marks: Iterable[Mark]) -> None:
        self._spare.extend(marks)
