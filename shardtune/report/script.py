"""What do a script's folder and logs say, beside its events? `shardtune run` records its command and its exit code."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from shardtune.durable import open_plain
from shardtune.report import formatting
from shardtune.report.read import listed, number, read_json, whole

KIND, LOGS = "script", "logs"  # as run/folder.py and launch/rank_output.py name them; a test compares
_NAMED = re.compile(r"rank-(\d{1,7})\.log")
_LAST_BYTES, _LAST_LINES = 16 << 10, 40


@dataclass(frozen=True)
class ScriptRecord:
    """Its `run.json`.

    Args:
        command: The script and its arguments.
        exit_code, ended: None while it runs, and where its launcher was killed.
    """

    command: tuple[str, ...]
    started: float | None
    ended: float | None
    exit_code: int | None

    @property
    def name(self) -> str:
        """`train.py`, or `-m package.module`."""
        words = self.command
        return " ".join(words[:2]) if words[:1] == ("-m",) else Path(words[0]).name if words else ""

    @property
    def line(self) -> str:
        return shlex.join(self.command)


def read_script(folder: Path) -> ScriptRecord | None:
    """None for any other run."""
    return script_of(read_json(folder / "run.json"))


def script_of(record: Mapping[str, Any]) -> ScriptRecord | None:
    """Of a `run.json` that is read already."""
    if record.get("kind") != KIND:
        return None
    command = tuple(word for word in listed(record.get("command")) if isinstance(word, str))
    started, ended = (at if (at := number(record.get(key))) and isfinite(at) else None for key in ("started", "ended"))
    return ScriptRecord(command, started, ended, whole(record.get("exit_code")))


def log_files(folder: Path) -> dict[int, Path]:
    """What each rank printed, by rank."""
    try:
        found = {int(match[1]): path for path in (folder / LOGS).iterdir() if (match := _NAMED.fullmatch(path.name))}
    except OSError:
        return {}
    return dict(sorted(found.items()))


def last_lines(path: Path) -> str:
    """The end of a log as it may be shown; empty if it cannot be read."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LAST_BYTES))
            piece = file.read(_LAST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = piece.rstrip().split("\n")[1 if size > _LAST_BYTES else 0 :]
    return formatting.plain("\n".join(_overwritten(line) for line in lines[-_LAST_LINES:]))


def _overwritten(line: str) -> str:
    """As a terminal shows it after a progress bar has written over itself."""
    return line.rstrip("\r").rpartition("\r")[2]
