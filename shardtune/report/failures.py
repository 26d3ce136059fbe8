"""Why did a run fail? The findings of its launcher, in `crash/`; the ranks themselves often see only consequences."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.report.read import listed, mapping, number, read_json, text, whole

FOLDER, LATEST = "crash", "findings.json"  # as launch/launcher.py writes them; a test compares
_MOST_FILES = 200
_MOST_BYTES = 4 << 20
_MARGIN = 5.0  # seconds after its findings that a file of an older version, which has no time, was written
_PARTS = re.compile(r"^  (why|fix|more): ", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """One failure of a run: its cause in three parts, and the ranks that failed.

    Args:
        time: When the cause happened.
        written: When the launcher recorded it, after all ranks had ended.
        rank: The rank that caused it; None where that is a node, or unknown.
        ranks: All ranks that failed, consequences included.
        restarted: The launcher restarted all ranks.
    """

    time: float
    written: float
    what: str
    why: str
    fix: str
    more: str
    exit_code: int | None
    rank: int | None
    ranks: frozenset[int]
    step: int | None
    restarted: bool

    @property
    def sentence(self) -> str:
        return self.what if self.exit_code is None else f"{self.what.rstrip('.')}; exit code {self.exit_code}."

    def includes(self, time: float, ranks: set[int]) -> bool:
        """Do events of these ranks at that time belong to this failure?"""
        return self.time - 60 <= time <= self.written + 60 and ranks <= self.ranks


def read_failures(folder: Path) -> tuple[Failure, ...]:
    """Every failure that a launcher has recorded in a run's folder, the latest last."""
    try:
        paths = sorted((folder / FOLDER).glob("findings*.json"), reverse=True)[:_MOST_FILES]
    except OSError:
        return ()
    found = {failure for path in paths if (failure := _read(path)) is not None}  # the latest is there twice
    return tuple(sorted(found, key=lambda failure: failure.written))


def current(failures: Sequence[Failure], since: float | None) -> Failure | None:
    """The failure that ended the run, if it was not started again `since`."""
    last = failures[-1] if failures else None
    return last if last is not None and (since is None or last.written >= since) else None


def _read(path: Path) -> Failure | None:
    try:
        if path.lstat().st_size > _MOST_BYTES:
            return None
    except OSError:
        return None
    record = read_json(path)
    findings = [mapping(finding) for finding in listed(record.get("findings"))]
    times = [at for finding in findings if (at := number(finding.get("time"))) is not None and math.isfinite(at)]
    if not times or not text(record.get("message")):
        return None
    written = number(record.get("time"))
    if written is not None and not math.isfinite(written):
        return None
    cause = findings[0] if written is not None else {}  # older versions did not put the cause first
    what, parts = _parts(text(record.get("message")))
    step = re.search(r"\(step (\d{1,12})\)", text(cause.get("doing")))
    return Failure(
        time=times[0] if cause else min(times),
        written=written if written is not None else max(times) + _MARGIN,
        what=what,
        why=parts.get("why", ""),
        fix=parts.get("fix", ""),
        more=f"more: {parts['more']}" if "more" in parts else "",
        exit_code=whole(record.get("exit_code")),
        rank=whole(cause.get("rank")),
        ranks=frozenset(rank for finding in findings if (rank := whole(finding.get("rank"))) is not None),
        step=int(step.group(1)) if step else None,
        restarted=record.get("restart") is True,
    )


def _parts(message: str) -> tuple[str, dict[str, str]]:
    """What happened, and the labelled parts of a message as run/failure.py renders it; of a traceback the line with the
    exception."""
    head, *rest = _PARTS.split(message)
    parts = dict(zip(rest[::2], (part.strip() for part in rest[1::2]), strict=True))
    first, *more = head.strip().splitlines() or [""]
    if more and not first.startswith("error: "):
        first = more[-1].strip() if first.startswith("Traceback") else f"{first} {more[-1].strip()}"
    return first.removeprefix("error: "), parts
