"""What happened, when? One append-only `events-rank<N>.jsonl` per rank; a crash loses at most the last line.

A disk that is full, read-only or gone costs no event while the run lives: lines wait in memory, in order, and are
written with the first event after there is room.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

VERSION = 2  # docs/events.md says what changed
_MOST_WAITING = 16 << 20  # bytes of lines kept in memory; the oldest go first
_PATIENCE = 1.0  # seconds a thread waits for another one that is writing: a dead network disk never returns


def _on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class EventLog:
    """Appends one JSON object per line: `v` (schema version), `time` (Unix seconds), `rank`, `event`, fields.

    Args:
        tell: Called with a sentence when the file cannot be written any more, and when it can again.
        held: Keep the lines in memory until `release`; without it they are never written, and no file is made.

    Example:
        >>> log.write("step", step=25, loss=1.93)
    """

    def __init__(
        self, folder: Path, rank: int, tell: Callable[[str], None] = _on_stderr, *, held: bool = False
    ) -> None:
        self.rank, self.tell, self.held = rank, tell, held
        self.path = folder / f"events-rank{rank}.jsonl"
        self._file: IO[bytes] | None = None
        self._waiting: deque[bytes] = deque()
        self._written = 0  # bytes of the first waiting line that are in the file already
        self._lost = 0  # lines that memory had no room for, since the file could be written last
        self._failed: OSError | None = None
        self._lock = threading.Lock()
        if not held:
            with suppress(OSError):  # the first write tries again, and says why not
                self._open_if_needed()

    def write(self, event: str, **fields: object) -> None:
        """Never raises for the disk's sake."""
        self._waiting.append(self._line(event, fields))
        self._flush()

    def release(self) -> None:
        """Write what was held back, and from here on every line at once."""
        self.held = False
        self._flush()

    def lines(self) -> Iterator[str]:
        """Every line of the log, those that wait for room too. A file that cannot be read has none."""
        try:
            text = self.path.read_bytes()
        except OSError:
            text = b""
        waiting = b"".join(self._waiting)[self._written :]
        yield from (text + waiting).decode("utf-8", errors="replace").splitlines()

    def finish(self) -> None:
        """Try once more to write what waits, and say what is lost if that fails."""
        self._flush()
        if self._failed is not None:
            lost = len(self._waiting) + self._lost
            self.tell(f"{lost:,} lines of {self.path} could not be written and are lost: {_reason(self._failed)}.")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        if self.held:
            return
        if not self._lock.acquire(timeout=_PATIENCE):
            return  # whoever holds it writes what waits, or hangs
        try:
            said = self._write_waiting()
        finally:
            self._lock.release()
        if said:
            self.tell(said)

    def _line(self, event: str, fields: dict[str, object]) -> bytes:
        record = {"v": VERSION, "time": round(time.time(), 3), "rank": self.rank, "event": event, **fields}
        # json would write a bare NaN, which is not JSON; a diverged loss must still be readable by every tool.
        # ASCII alone: a name that is not UTF-8 cannot break the write, nor a U+2028 in a text the line.
        return (json.dumps(_finite(record)) + "\n").encode()

    def _write_waiting(self) -> str:
        """Write what waits, as far as it goes; returns what the user should be told."""
        failed_before, waited = self._failed, len(self._waiting) - 1
        try:
            self._open_if_needed()
            self._drain()
        except OSError as error:
            self._failed = error
            self._drop_oldest()
            if failed_before is not None:
                return ""
            return (
                f"{self.path.name} cannot be written: {_reason(error)}. Training goes on; the lines are kept in memory "
                "until there is room."
            )
        if failed_before is None:
            return ""
        said = f"{self.path.name} can be written again; {waited:,} lines that were kept in memory are in it now"
        said += f", {self._lost:,} older ones are lost." if self._lost else "."
        self._failed, self._lost = None, 0
        self._waiting.append(self._line("warning", {"about": "events", "text": said}))
        return self._write_waiting() or said

    def _drain(self) -> None:
        # Whole, without a buffer: a process that is killed has written a line or, seldom, a part of its last one.
        assert self._file is not None
        while self._waiting:
            line = self._waiting[0]
            while self._written < len(line):
                self._written += self._file.write(line[self._written :])
            self._waiting.popleft()
            self._written = 0

    def _drop_oldest(self) -> None:
        kept = sum(map(len, tuple(self._waiting)))  # a copy: another thread may append
        first = 1 if self._written else 0  # half of it is in the file
        while kept > _MOST_WAITING and len(self._waiting) > first + 1:
            kept -= len(self._waiting[first])
            del self._waiting[first]
            self._lost += 1

    def _open_if_needed(self) -> None:
        """At first, and after a failure: a mount that was lost and is back has another file there, or a new handle."""
        if self._file is not None and (self._failed is None or _is_still(self.path, self._file)):
            return
        self.close()
        torn = _is_torn(self.path)
        # No link is followed: whoever may put one there must not choose the file that is written to. Nor is a fifo's
        # reader waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.fdopen(os.open(self.path, flags, 0o644), "ab", buffering=0)
        self._written = 0
        if torn:
            self._waiting.appendleft(b"\n")  # what a crash has cut stays a line of its own


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _is_still(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False  # not there, or not reachable: opening it says which


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
