"""What has been appended since the last read? The new events of one file, which may be truncated or deleted."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtune.durable import open_plain, read_plain

NAMED = re.compile(r"events-rank(\d{1,7})\.jsonl")
_PIECE = 8 << 20  # bytes read at a time: files may have many gigabytes
_LONGEST = 4 << 20  # a longer line is not one of ours, and is skipped

Event = dict[str, Any]


@dataclass
class NewEvents:
    """The result of one read.

    Args:
        events: In the order they were written.
        unreadable: Lines that were cut off by a crash, or are not events.
        restarted_file: The file was replaced or truncated: what was read before no longer counts.
    """

    events: list[Event] = field(default_factory=list)
    unreadable: int = 0
    restarted_file: bool = False


class Tail:
    """Reads an append-only file from where it stopped. An incomplete last line is left for the next read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._inode, self._rest, self._too_long = 0, -1, b"", False

    @property
    def half_line(self) -> bool:
        """Whether the file ends in the middle of a line, as far as it was read."""
        return bool(self._rest) or self._too_long

    def read(self, most: int = _PIECE) -> NewEvents:
        """The next events, from up to `most` bytes; empty when there is nothing new, or no file."""
        news = NewEvents()
        try:
            with open_plain(self.path) as file:
                seen = os.fstat(file.fileno())
                if self._inode not in (-1, seen.st_ino) or seen.st_size < self._offset:
                    news.restarted_file = True
                    self._offset, self._rest, self._too_long = 0, b"", False
                self._inode = seen.st_ino
                file.seek(self._offset)
                piece = file.read(most)
        except OSError:  # deleted meanwhile, or the disk is unavailable: nothing new
            return news
        self._offset += len(piece)
        self._take(piece, news)
        return news

    def _take(self, piece: bytes, news: NewEvents) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if self._too_long and lines:
            lines, self._too_long = lines[1:], False  # the end of the skipped line
        if len(self._rest) > _LONGEST:
            news.unreadable += not self._too_long
            self._rest, self._too_long = b"", True
        for line in lines:
            event = parse(line)
            if event is not None:
                news.events.append(event)
            elif line.strip():
                news.unreadable += 1


def parse(line: bytes) -> Event | None:
    """The event of a line, or None if it is not one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def event_files(folder: Path) -> dict[int, Path]:
    """The event files of a run by rank; empty if there is no such folder (any more)."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return {}
    found = {int(match[1]): folder / name for name in names if (match := NAMED.fullmatch(name))}
    return dict(sorted(found.items()))


def number(value: object) -> float | None:
    """A number as events have it; NaN and infinity are written as `"nan"` and `"inf"`."""
    if type(value) is float:  # called tens of millions of times for a long run, and nearly always this
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return None
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def whole(value: object) -> int | None:
    """A step: an integer that fits a column."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file of a run; empty where there is none, or it is not a plain file."""
    try:
        return mapping(json.loads(read_plain(path)))
    except (OSError, ValueError, RecursionError):
        return {}


def mapping(value: object) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def listed(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def text(value: object) -> str:
    """The value if it is a string, else an empty one."""
    return value if isinstance(value, str) else ""
