"""Was the run asked to stop? One SIGTERM, SIGUSR1 or Ctrl-C ends it at the next safe point, on all ranks together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType, TracebackType

from shardtune.run.exit_codes import INTERRUPTED, TERMINATED, stop_signals, stopped_by

GRACE_VARIABLE = "SHARDTUNE_GRACE_SECONDS"
_USUAL_GRACE = 30.0  # what Kubernetes and torch give unless told otherwise
_SAME_PRESS = 1.0  # seconds; the terminal and the launcher both hand on one Ctrl-C


class StopRequest:
    """Remembers the signal that asked to stop. A second one, later than a moment, leaves at once.

    Until `wait_for_step` is called there is nothing to save, and the first signal ends the process by SystemExit, from
    wherever its main thread is. After it, training asks `requested` at every step.

    Used as a context manager around the whole work of a process; the former handlers come back afterwards.

    Args:
        acknowledge: Say so when a signal is remembered: a step may take minutes. One process of a run does.
    """

    def __init__(self, *, acknowledge: bool = False) -> None:
        self._acknowledge = acknowledge
        self.signal: signal.Signals | None = None
        self._first = 0.0
        self._saves = False
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Of a run that stopped in good order; a rank that got no signal itself was preempted with the others."""
        return stopped_by(self.signal if self.signal is not None else signal.SIGTERM)

    def wait_for_step(self) -> None:
        """From here on a signal is only remembered: the next step's end saves first."""
        # A signal that fell into code which swallows exceptions (a destructor) is not lost.
        if self.signal is not None:
            raise SystemExit(self.exit_code)
        self._saves = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first = signal.Signals(number), now
            if not self._saves:
                raise SystemExit(self.exit_code)
            if self._acknowledge:
                with suppress(OSError):  # a terminal that is closed; print may not be called again from a handler
                    os.write(2, f"\n{stopping_after_step(number)}\n".encode())
        elif now - self._first > _SAME_PRESS:
            os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)


def stopping_after_step(number: int) -> str:
    """The answer to the first signal."""
    again = "press Ctrl-C again" if number == signal.SIGINT else "a second signal tells it"
    return f"{signal.Signals(number).name}: stopping after this step, with a checkpoint; {again} to leave at once."


def ignore_stop_signals(worker: int = 0) -> None:
    """For the processes that load data: a scheduler signals them too, and the last step still needs them."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def grace_seconds(asked: float | None, environ: Mapping[str, str]) -> float:
    """Seconds between SIGTERM and SIGKILL: as the config says, or the scheduler's manifest, or the usual 30."""
    if asked is not None:
        return asked
    try:
        return float(environ[GRACE_VARIABLE])
    except (KeyError, ValueError):
        return _USUAL_GRACE


class Grace:
    """Is the grace long enough for a step and a save, going by the longest so far?"""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.step = 0.0
        self.save = 0.0
        self._warned = False

    def warning(self) -> str | None:
        """What to tell the user, once, when the grace is too short; None otherwise."""
        needed = self.step + self.save
        if self._warned or self.save == 0.0 or needed <= self.seconds:
            return None
        self._warned = True
        return (
            f"Stopping takes up to {needed:.0f} s (a step {self.step:.1f} s, a save {self.save:.1f} s), but the "
            f"scheduler kills {self.seconds:.0f} s after its SIGTERM: what came after the last checkpoint is lost. "
            f"Give the job a longer grace period ({1.5 * needed + 5:.0f} s) and say so in train.grace_seconds."
        )
