"""What happened, when? One append-only `events-rank<N>.jsonl` per rank; a crash loses at most the last line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO

VERSION = 2  # docs/events.md says what changed


class EventLog:
    """Appends one JSON object per line: `v` (schema version), `time` (Unix seconds), `rank`, `event`, fields.

    Example:
        >>> log.write("step", step=25, loss=1.93)
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.path = folder / f"events-rank{rank}.jsonl"
        torn = _is_torn(self.path)
        self._file: IO[bytes] = self.path.open("ab", buffering=0)
        if torn:
            self._append(b"\n")  # what a crash has cut stays a line of its own

    def write(self, event: str, **fields: object) -> None:
        record = {"v": VERSION, "time": round(time.time(), 3), "rank": self.rank, "event": event, **fields}
        # json would write a bare NaN, which is not JSON; a diverged loss must still be readable by every tool.
        # ASCII alone: a name that is not UTF-8 cannot break the write, nor a U+2028 in a text the line.
        self._append((json.dumps(_finite(record)) + "\n").encode())

    def _append(self, line: bytes) -> None:
        # Whole, without a buffer: a process that is killed has written a line or, seldom, a part of its last one.
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


def _is_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
