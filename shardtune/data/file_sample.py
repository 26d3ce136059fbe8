"""How many rows do files have, and what do some of them look like? Without reading all of large ones.

Neither torch nor `datasets` is imported, and how much is read does not grow with the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from shardtune.data.chunks import BadRow, Chunk, Row, count_rows, rows_of
from shardtune.data.readers import DataFile
from shardtune.data.source import Source, reading, split_files

_FILES = 16  # of a source that are looked into
_READ_WHOLE = 8 * 2**20  # bytes of a source up to which all of it is read
_COUNTED = 64 * 2**20  # of a file of lines, up to which its lines are counted
_PLACES, _PIECE = 24, 128 * 1024  # of a larger file: pieces that are read, and their bytes
_ROWS = 2000  # that a sample has, at most
_SLICE = re.compile(r"(?P<split>[\w.-]+)(?:\[(?P<first>\d*%?):(?P<last>\d*%?)\])?")

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class FileSample:
    """Rows of a source.

    Attributes:
        rows: How many there are.
        counted: All of them were counted, not extrapolated from a part.
        some: Rows from all over it.
        lines: They are lines of text files.
    """

    rows: int
    counted: bool
    some: tuple[Row, ...]
    lines: bool


def sample_source(source: Source, split: str, key: str) -> FileSample | None:
    """None where only `datasets` can tell: hub names, folders it wrote, URLs, and slices other than `train[:90%]`.

    Args:
        key: The config key that named the split, for messages.

    Raises:
        UserInputError: there is no such split, or a file is damaged.
    """
    sliced = _SLICE.fullmatch(split)
    if sliced is None or "://" in source.path:
        return None
    files = split_files(source, sliced["split"], key)
    if files is None:
        return None
    some = _spread(files, _FILES)
    with reading(source, "data.dataset_name_or_path"):
        each = [_look_into(file, _ROWS // len(some), _READ_WHOLE // len(some)) for file in some]
    rows = sum(rows for rows, _, _ in each) * _bytes(files) / max(1, _bytes(some))
    first, last = (_bound(sliced[name], rows, default) for name, default in (("first", 0.0), ("last", rows)))
    return FileSample(
        rows=max(0, round(last - first)),
        counted=len(some) == len(files) and all(counted for _, counted, _ in each),
        some=tuple(row for _, _, rows_here in each for row in rows_here),
        lines=all(file.kind == "text" for file in files),
    )


def _bound(text: str | None, rows: float, default: float) -> float:
    if not text:
        return default
    return min(rows, rows * float(text[:-1]) / 100 if text.endswith("%") else float(text))


def _look_into(file: DataFile, wanted: int, read_whole: int) -> tuple[float, bool, list[Row]]:
    """Rows, whether all were counted, and some of them."""
    if file.kind == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(file.name) as opened:
            rows = opened.metadata.num_rows
        return rows, True, _good(islice(file.chunks(), 2), wanted)
    size = file.size()
    if file.kind in ("jsonl", "text") and file.compression is None and size > read_whole and not _is_list(file):
        pieces = _pieces(file, size)
        if size <= _COUNTED:
            return _lines(file), True, _good(pieces, wanted)
        read = sum(len(piece.content) for piece in pieces)
        return sum(map(count_rows, pieces)) * size / max(1, read), False, _good(pieces, wanted)
    rows, position, chunks = 0, 0, []
    for chunk in file.chunks():
        rows, position = rows + count_rows(chunk), chunk.position
        chunks.append(chunk)
        if position > read_whole:
            return rows * size / position, False, _good(chunks, wanted)
    return rows, True, _good(chunks, wanted)


def _lines(file: DataFile) -> int:
    """All of them, blank ones too: ten times faster than to look at each."""
    with Path(file.name).open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(2**20), b""))


def _is_list(file: DataFile) -> bool:
    """A list of rows under a name that promises lines."""
    with Path(file.name).open("rb") as stream:
        return file.kind == "jsonl" and stream.read(64).lstrip().startswith(b"[")


def _pieces(file: DataFile, size: int) -> list[Chunk]:
    """Whole lines from all over a file."""
    found = []
    with Path(file.name).open("rb") as stream:
        for start in range(0, size, max(_PIECE, size // _PLACES)):
            stream.seek(start)
            if start:
                stream.readline()  # the line that begins before
            content = stream.read(_PIECE)
            content += stream.readline()
            found.append(Chunk(file.name, "jsonl" if file.kind == "jsonl" else "text", content, 1))
    return found


def _good(chunks: Iterable[Chunk], wanted: int) -> list[Row]:
    rows = [row for chunk in chunks for _, row in rows_of(chunk) if not isinstance(row, BadRow)]
    return _spread(rows, max(1, wanted))


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` of them, evenly from first to last."""
    return [items[number * len(items) // count] for number in range(count)] if len(items) > count else list(items)


def _bytes(files: Sequence[DataFile]) -> int:
    return sum(file.size() for file in files)
