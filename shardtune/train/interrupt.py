"""Was the run asked to stop? One Ctrl-C or SIGTERM ends it after the current step, on all ranks together."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

_SAME_PRESS = 1.0  # seconds; the terminal and the launcher both hand on one Ctrl-C
_GRACE = 60.0  # seconds from the first signal to the next step boundary, before the process leaves anyway


class StopRequest:
    """Remembers the signal that asked to stop. A second one, later than a moment, leaves at once.

    Used as a context manager around training; the former handlers come back afterwards.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._first = 0.0
        self._former: dict[signal.Signals, object] = {}
        self._watchdog: threading.Timer | None = None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._watchdog:
            self._watchdog.cancel()

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if now - self._first > _SAME_PRESS:
                os._exit(128 + number)
            return
        self.signal, self._first = signal.Signals(number), now
        # A rank that waits for a dead one never reaches the next step.
        self._watchdog = threading.Timer(_GRACE, os._exit, args=(128 + number,))
        self._watchdog.daemon = True
        self._watchdog.start()
