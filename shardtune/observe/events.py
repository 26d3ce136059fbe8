"""What happened, when? One append-only `events-rank<N>.jsonl` per rank; a crash loses at most the last line.

While the disk is full, read-only or gone, lines are kept in memory, in order, and written with the first event after
the file is writable again.
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
_MAX_WAITING_BYTES = 16 << 20  # lines kept in memory; the oldest are dropped first
_LOCK_SECONDS = 1.0  # a thread waits this long for another one that is writing: a dead network disk never returns


def _on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class EventLog:
    """Appends one JSON object per line: `v` (schema version), `time` (Unix seconds), `rank`, `event`, fields.

    Args:
        notify: Called with a sentence when the file becomes unwritable, and when it is writable again.
        deferred: Keep the lines in memory until `release`; without it they are never written, and no file is made.

    Example:
        >>> log.write("step", step=25, loss=1.93)
    """

    def __init__(
        self, folder: Path, rank: int, notify: Callable[[str], None] = _on_stderr, *, deferred: bool = False
    ) -> None:
        self.rank, self.notify, self.deferred = rank, notify, deferred
        self.path = folder / f"events-rank{rank}.jsonl"
        self._file: IO[bytes] | None = None
        self._waiting: deque[bytes] = deque()
        self._written = 0  # bytes of the first waiting line that are in the file already
        self._lost = 0  # lines that memory had no room for, since the file could be written last
        self._failed: OSError | None = None
        self._lock = threading.Lock()
        if not deferred:
            with suppress(OSError):  # the first write tries again, and says why not
                self._open_if_needed()

    def write(self, event: str, **fields: object) -> None:
        """Never raises an OSError."""
        self._waiting.append(self._line(event, fields))
        self._flush()

    def release(self) -> None:
        """Write the deferred lines, and every later line immediately."""
        self.deferred = False
        self._flush()

    def lines(self) -> Iterator[str]:
        """Every line of the log, including those still in memory. A file that cannot be read has none."""
        try:
            text = self.path.read_bytes()
        except OSError:
            text = b""
        waiting = b"".join(self._waiting)[self._written :]
        yield from (text + waiting).decode("utf-8", errors="replace").splitlines()

    def finish(self) -> None:
        """Try once more to write the waiting lines, and report how many are lost if that fails."""
        self._flush()
        if self._failed is not None:
            lost = len(self._waiting) + self._lost
            self.notify(f"{lost:,} events could not be written to {self.path} and are lost: {_reason(self._failed)}.")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        if self.deferred:
            return
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return  # the thread that holds it writes the waiting lines, or hangs
        try:
            message = self._write_waiting()
        finally:
            self._lock.release()
        if message:
            self.notify(message)

    def _line(self, event: str, fields: dict[str, object]) -> bytes:
        record = {"v": VERSION, "time": round(time.time(), 3), "rank": self.rank, "event": event, **fields}
        # json would write a bare NaN, which is not valid JSON; a diverged loss must be readable by every tool.
        # ASCII only: a name that is not UTF-8 cannot break the write, nor a U+2028 in a text the line.
        return (json.dumps(_finite(record)) + "\n").encode()

    def _write_waiting(self) -> str:
        """Write the waiting lines, as far as possible; returns a message for the user."""
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
                f"{self.path.name} cannot be written: {_reason(error)}. Training continues; events are kept in memory "
                "until it can be written again."
            )
        if failed_before is None:
            return ""
        message = f"{self.path.name} can be written again; {waited:,} events kept in memory were written"
        message += f", {self._lost:,} older ones are lost." if self._lost else "."
        self._failed, self._lost = None, 0
        self._waiting.append(self._line("warning", {"about": "events", "text": message}))
        return self._write_waiting() or message

    def _drain(self) -> None:
        # Unbuffered: a killed process has written whole lines or, rarely, a part of its last one.
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
        while kept > _MAX_WAITING_BYTES and len(self._waiting) > first + 1:
            kept -= len(self._waiting[first])
            del self._waiting[first]
            self._lost += 1

    def _open_if_needed(self) -> None:
        """The first time, and after a failure: a remounted disk needs a new file handle."""
        if self._file is not None and (self._failed is None or _is_still(self.path, self._file)):
            return
        self.close()
        torn = _is_torn(self.path)
        # O_NOFOLLOW: whoever may put a link there must not choose the file that is written to. O_NONBLOCK: do not wait
        # for a fifo's reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.fdopen(os.open(self.path, flags, 0o644), "ab", buffering=0)
        self._written = 0
        if torn:
            self._waiting.appendleft(b"\n")  # a line that was cut off by a crash stays a separate line


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
