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
_USUAL_GRACE = 30.0  # the default of Kubernetes and torch
_SCHEDULED = ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID")  # every container of a pod has the first, every job the second
_SAME_PRESS = 1.0  # seconds; the terminal and the launcher both forward one Ctrl-C


class StopRequest:
    """Remembers the signal that asked to stop. A second one, more than a second later, exits immediately.

    Until `wait_for_step` is called there is nothing to save, and the first signal raises SystemExit wherever the main
    thread is. After that, the training loop checks `requested` at every step.

    Used as a context manager around the whole work of a process; the former handlers are restored afterwards.

    Args:
        acknowledge: Print a line when a signal arrives, since a step may take minutes. One process of a run does.
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
    def came_early(self) -> bool:
        """Whether the signal came before there was anything to save."""
        return self.signal is not None and not self._saves

    @property
    def exit_code(self) -> int:
        """Of a run that stopped cleanly; a rank that got no signal itself was preempted with the others."""
        return stopped_by(self.signal if self.signal is not None else signal.SIGTERM)

    def wait_for_step(self) -> None:
        """From here on a signal is only remembered: the run stops, with a checkpoint, after the current step."""
        # The SystemExit may have been raised in code that swallows exceptions (a destructor).
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
                with suppress(OSError):  # a closed terminal; print is not reentrant, so not in a handler
                    os.write(2, f"\n{stopping_after_step(number)}\n".encode())
        elif now - self._first > _SAME_PRESS:
            os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)


def stopping_after_step(number: int, *, of_script: bool = False) -> str:
    """The line printed for the first signal; what a script does about it is its own business."""
    again = "press Ctrl-C again" if number == signal.SIGINT else "send a second signal"
    what = "the script is told to stop" if of_script else "stopping after this step, with a checkpoint"
    return f"{signal.Signals(number).name}: {what}; {again} to exit immediately."


def ignore_stop_signals(worker: int = 0) -> None:
    """For data loader workers: a scheduler signals them too, and the last step still needs them."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def grace_seconds(asked: float | None, environ: Mapping[str, str]) -> float:
    """Seconds between SIGTERM and SIGKILL: from the config, the environment variable, or 30."""
    if asked is not None:
        return asked
    try:
        return float(environ[GRACE_VARIABLE])
    except (KeyError, ValueError):
        return _USUAL_GRACE


def known_grace(asked: float | None, environ: Mapping[str, str]) -> float | None:
    """`grace_seconds` where it is named or somebody is known to send SIGKILL after it; elsewhere None."""
    known = asked is not None or any(name in environ for name in (GRACE_VARIABLE, *_SCHEDULED))
    return grace_seconds(asked, environ) if known else None


class Grace:
    """Is the grace period long enough for a step and a save, judging by the longest so far?

    Args:
        seconds: None where there is no grace period.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.step = 0.0
        self.save = 0.0
        self._warned = False

    def check(self, step_seconds: float, longest_save: float) -> str | None:
        """A warning, once, when the grace period is too short; None otherwise."""
        self.step, self.save = max(self.step, step_seconds), longest_save
        needed = self.step + self.save
        if self.seconds is None or self._warned or self.save == 0.0 or needed <= self.seconds:
            return None
        self._warned = True
        return (
            f"Stopping takes up to {needed:.0f} s (a step {self.step:.1f} s, a save {self.save:.1f} s), but the "
            f"scheduler sends SIGKILL {self.seconds:.0f} s after SIGTERM: steps after the last checkpoint would be "
            f"lost. Give the job a longer grace period ({1.5 * needed + 5:.0f} s) and set train.grace_seconds to it."
        )
