"""What is the state of a run? From its last events, whoever holds its lease, and how long it has been quiet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardtune.lease import looks_alive
from shardtune.report.failures import Failure
from shardtune.report.read import text
from shardtune.report.words import age

LEASE = ".run.lease"  # as launch/which_run.py names it; a test compares
ENDINGS = ("run_end", "run_failed", "out_of_memory", "no_progress")
# Without a lease to ask, a run that wrote nothing for this long counts as gone: longer than loading large weights or
# an evaluation takes, and shorter than anybody would wait.
STALE_SECONDS = 900.0

State = Literal["starting", "running", "done", "stopped", "failed", "stale"]


@dataclass(frozen=True)
class Status:
    state: State
    text: str = ""
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Life:
    """What the files of a run tell of its course; times in Unix seconds, None where nothing was written yet.

    Args:
        recorded: When its folder was made, or it was started again, as its record says.
        began: Its last `run_start`.
        last_step: Its last step.
        last_time: Its last event.
        ending: The last event of ENDINGS after the last start.
    """

    recorded: float | None = None
    began: float | None = None
    last_step: float | None = None
    last_time: float | None = None
    ending: Mapping[str, Any] | None = None

    @property
    def is_training(self) -> bool:
        """Whether it has made a step since it was last started."""
        return self.last_step is not None and (self.began is None or self.last_step >= self.began)


def status_of(folder: Path, life: Life, now: float, failure: Failure | None = None) -> Status:
    """The state of a run.

    Args:
        failure: What its launcher found to have ended it, if it has; it knows more than the ranks that wrote events.
    """
    lease = folder / LEASE
    if failure is not None:
        if failure.restarted and looks_alive(lease):
            return Status("starting", f"starting again after: {failure.sentence}")
        if _taken_since(lease, failure.written):
            return Status("starting", "started again; it has not gone on yet")
        return Status("failed", failure.sentence, tuple(part for part in (failure.why, failure.fix) if part))
    if life.ending is not None:
        if life.last_time is not None and _taken_since(lease, life.last_time):
            return Status("starting", "started again; it has not gone on yet")
        return _ended(life.ending)
    under_way: State = "running" if life.is_training else "starting"
    last = max((time for time in (life.recorded, life.last_time) if time is not None), default=None)
    quiet = now - last if last is not None else None
    if life.recorded is not None and life.last_time is None and not lease.exists():
        # Whoever makes a run's record holds its lease, and lets go of it only in good order.
        return Status("stopped", "it ended before it wrote an event")
    alive = looks_alive(lease) if lease.exists() else None
    if alive:
        long_quiet = quiet is not None and quiet > STALE_SECONDS
        return Status(under_way, f"alive, but no event for {age(quiet)}" if quiet and long_quiet else "")
    if alive is False:
        return Status("failed", "its process ended without writing why")
    if quiet is None:
        return Status("stale", "no events, and no process holds the run")
    if quiet <= STALE_SECONDS:
        return Status(under_way)
    return Status("stale", f"no event for {age(quiet)}, and none that it ended")


def _taken_since(lease: Path, ended: float) -> bool:
    """Whether a process that lives took the run after that: it writes its events once the run accepts its config."""
    try:
        return lease.stat().st_mtime > ended and looks_alive(lease) is True
    except OSError:
        return False


def _ended(ending: Mapping[str, Any]) -> Status:
    kind = ending["event"]
    if kind == "run_end":
        if ending.get("status") == "done":
            return Status("done")
        return Status("stopped" if ending.get("status") == "stopped" else "failed", text(ending.get("text")))
    if kind == "out_of_memory":
        return Status("failed", f"out of memory in {text(ending.get('phase')) or 'an unknown phase'}")
    if kind == "no_progress":
        return Status("failed", text(ending.get("text")) or "a rank made no progress")
    code = ending.get("exit_code")
    said = text(ending.get("text"))
    return Status("failed", f"{said} (exit code {code})" if isinstance(code, int) else said)
