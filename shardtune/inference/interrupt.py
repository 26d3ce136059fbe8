"""Was the answer to be stopped? The first Ctrl-C is noted, and seen between two tokens; the second one interrupts."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopOnInterrupt:
    """For the main thread, around an answer.

    An exception in the middle of a forward pass could leave the adapter switched off: the next answer would be the
    base's, and nobody would see it.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> StopOnInterrupt:
        self._before = signal.signal(signal.SIGINT, self._noted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
