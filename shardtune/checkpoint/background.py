"""How are checkpoints written while training continues? One save at a time, its outcome reported at a step boundary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save: its path or the error, and its seconds in the background (0 if training waited)."""

    step: int
    path: Path | None
    error: OSError | None
    background_seconds: float


class BackgroundWriter:
    """Runs one job at a time in a thread of its own.

    - `start` first waits for the job before: two saves never overlap, and memory holds at most one of them.
    - `take` gives the outcome of a finished job, once, to the thread that trains; nothing is reported elsewhere.
    - An OSError (full disk, lost mount) is an outcome. Anything else is a mistake in the program: `take` raises it.
    - The thread is not a daemon: a process that ends by returning, or by an exception, waits for the save. One that
      is killed, or leaves by `os._exit`, does not; what it leaves is what `CheckpointStore` says for a crash.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._mistake: BaseException | None = None

    def start(self, step: int, job: Callable[[], Path]) -> None:
        """Run `job` beside training."""
        assert self._outcome is None and self._mistake is None, "the outcome of the save before was not taken"
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(step, job, True), name=f"save-{step}")
        self._thread.start()

    def run(self, step: int, job: Callable[[], Path]) -> None:
        """Run `job` here and now."""
        self.wait()
        self._run(step, job, False)

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self) -> Outcome | None:
        """The outcome of a job that has ended since the last call."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self.wait()
        mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake
        outcome, self._outcome = self._outcome, None
        return outcome

    def _run(self, step: int, job: Callable[[], Path], beside: bool) -> None:
        began = time.perf_counter()
        path: Path | None = None
        failed: OSError | None = None
        try:
            path = job()
        except OSError as error:
            failed = error
        except BaseException as error:  # noqa: BLE001 - carried to the training thread, which raises it
            self._mistake = error
            return
        self._outcome = Outcome(step, path, failed, time.perf_counter() - began if beside else 0.0)
