"""How does a run stand? Its last words, whoever holds its lease, and how long it has been quiet."""

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

State = Literal["running", "done", "stopped", "failed", "stale"]


@dataclass(frozen=True)
class Status:
    state: State
    text: str = ""
    advice: tuple[str, ...] = ()


def status_of(
    folder: Path, ending: Mapping[str, Any] | None, last_time: float | None, now: float, failure: Failure | None = None
) -> Status:
    """The state of a run.

    Args:
        ending: The last event of ENDINGS after the last start, if there is one.
        last_time: When its last event was written.
        failure: What its launcher found to have ended it, if it has; it knows more than the ranks that wrote events.
    """
    if failure is not None:
        if failure.restarted and looks_alive(folder / LEASE):
            return Status("running", f"starting again after: {failure.sentence}")
        return Status("failed", failure.sentence, tuple(part for part in (failure.why, failure.fix) if part))
    if ending is not None:
        return _ended(ending)
    quiet = now - last_time if last_time is not None else None
    lease = folder / LEASE
    alive = looks_alive(lease) if lease.exists() else None
    if alive:
        long_quiet = quiet is not None and quiet > STALE_SECONDS
        return Status("running", f"alive, but without an event for {age(quiet)}" if quiet and long_quiet else "")
    if alive is False:
        return Status("failed", "its process is gone and did not say why")
    if quiet is None:
        return Status("stale", "no events yet, and nobody holds the run")
    if quiet <= STALE_SECONDS:
        return Status("running")
    return Status("stale", f"no event for {age(quiet)}, and no word of an end")


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
