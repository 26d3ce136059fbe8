"""Was the answer to be stopped? The first Ctrl-C is noted, and seen between two tokens; the second one interrupts."""

from __future__ import annotations

import signal
import sys
import termios
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any


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
        self._terminal = _without_echoed_keys()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
        if self._terminal is not None:
            with suppress(termios.error):  # it is gone
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._terminal)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _without_echoed_keys() -> list[Any] | None:
    """No ^C within an answer: it would also move the line that the growing answer is redrawn from.

    Returns the terminal's settings before; None where stdin is no terminal.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
        now = termios.tcgetattr(sys.stdin)
        now[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, now)
    except (termios.error, OSError, ValueError):
        return None
    return before
