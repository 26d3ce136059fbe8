"""What is the state of a run? From its last events, its lease, and the time since its last event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardtune.lease import looks_alive
from shardtune.report.failures import Failure
from shardtune.report.formatting import age
from shardtune.report.read import text

LEASE = ".run.lease"  # as run/folder.py names it; a test compares
# Exit codes of a script that was asked to stop; a test compares them with run/exit_codes.py.
STOPPED = (75, 130, 143)
ENDINGS = ("run_end", "run_failed", "out_of_memory", "no_progress")
# Without a lease to check, a run that wrote nothing for this long is stale: longer than loading large weights or an
# evaluation takes.
STALE_SECONDS = 900.0

State = Literal["starting", "running", "done", "stopped", "failed", "stale"]


@dataclass(frozen=True)
class Status:
    state: State
    text: str = ""
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Liveness:
    """What the files of a run say about its progress; Unix seconds, None where nothing was written yet.

    Args:
        recorded: When it was created or restarted, according to its record.
        began: Its last `run_start`.
        last_step: Its last step.
        last_time: Its last event.
        ending: The last event of ENDINGS after the last start.
        is_script: A run of `shardtune run`, which need not have steps.
        exit_code: Of a script, as its launcher recorded it; None while it runs.
    """

    recorded: float | None = None
    began: float | None = None
    last_step: float | None = None
    last_time: float | None = None
    ending: Mapping[str, Any] | None = None
    is_script: bool = False
    exit_code: int | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether it has made a step since it was last started; of a script, whether its ranks have started."""
        if self.is_script:
            return self.began is not None and self.began >= (self.recorded or 0.0)
        return self.last_step is not None and (self.began is None or self.last_step >= self.began)


def status_of(folder: Path, liveness: Liveness, now: float, failure: Failure | None = None) -> Status:
    """The state of a run.

    Args:
        failure: What ended it according to its launcher, which knows more than the ranks that wrote events.
    """
    lease = folder / LEASE
    if failure is not None:
        if failure.restarted and looks_alive(lease):
            return Status("starting", f"restarting after: {failure.sentence}")
        if _leased_since(lease, failure.written):
            return Status("starting", "restarted; not resumed yet")
        return Status(
            "failed", failure.sentence, tuple(part for part in (failure.why, failure.fix, failure.more) if part)
        )
    if liveness.exit_code is not None and (liveness.ending is None or liveness.ending["event"] == "run_end"):
        return _exited(liveness.exit_code)
    if liveness.ending is not None:
        if liveness.last_time is not None and _leased_since(lease, liveness.last_time):
            return Status("starting", "restarted; not resumed yet")
        return _ended(liveness.ending)
    under_way: State = "running" if liveness.is_under_way else "starting"
    last = max((time for time in (liveness.recorded, liveness.last_time) if time is not None), default=None)
    quiet = now - last if last is not None else None
    if liveness.recorded is not None and liveness.last_time is None and not lease.exists():
        # The process that creates a run's record holds its lease, and releases it only on a clean exit.
        return Status("stopped", "it ended before its first event")
    alive = looks_alive(lease) if lease.exists() else None
    if alive:
        long_quiet = quiet is not None and quiet > STALE_SECONDS
        return Status(under_way, f"alive, but no event for {age(quiet)}" if quiet and long_quiet else "")
    if alive is False:
        return Status("failed", "its process died without an error message")
    if quiet is None:
        return Status("stale", "no events, and no process has its lease")
    if quiet <= STALE_SECONDS:
        return Status(under_way)
    return Status("stale", f"no event for {age(quiet)}, and no end event")


def _leased_since(lease: Path, ended: float) -> bool:
    """Whether a live process has leased the run since then: it writes events once its config is accepted."""
    try:
        return lease.stat().st_mtime > ended and looks_alive(lease) is True
    except OSError:
        return False


def _exited(code: int) -> Status:
    if code == 0:
        return Status("done")
    return Status("stopped" if code in STOPPED else "failed", f"exit code {code}")


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
    message = text(ending.get("text"))
    return Status("failed", f"{message} (exit code {code})" if isinstance(code, int) else message)
