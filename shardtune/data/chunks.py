"""What are the rows of a chunk? A chunk is a piece of a file as it lies there; each row knows the line it stands on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# Problems that have a fix of their own.
NOT_UTF_8, LONE_SURROGATE = "not UTF-8", "lone surrogate"
MAC_LINES, INDENTED = "its lines end in \\r alone", "the object is indented over several lines"
SHOWN = 160  # characters of a broken line that a message shows

Row = Mapping[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read or rendered: what is wrong, and the beginning of what stands there."""

    message: str
    shown: str = ""


@dataclass(frozen=True)
class Chunk:
    """Some rows as they stand in a file."""

    file: str  # as messages name it
    kind: Literal["jsonl", "text", "arrow", "rows"]
    content: Any  # bytes (jsonl, text), a pyarrow RecordBatch (arrow), or a list of (number, Row or BadRow)
    first: int  # number of the first line or row, from 1
    position: int = 0  # how far into the file its reader is, in bytes (rows for a `datasets` folder)
    unit: Literal["line", "row"] = "line"


def rows_of(chunk: Chunk) -> Iterator[tuple[int, Row | BadRow]]:
    """(line or row number, the row) of each row of a chunk."""
    if chunk.kind == "rows":
        return ((number, _decoded(row)) for number, row in chunk.content)
    if chunk.kind == "arrow":
        return enumerate(_arrow_rows(chunk.content), start=chunk.first)
    lines = _lines(chunk.content)
    if chunk.kind == "text":
        return ((n, line if isinstance(line, BadRow) else {"text": line}) for n, line in enumerate(lines, chunk.first))
    return (
        (n, _json_row(line)) for n, line in enumerate(lines, chunk.first) if isinstance(line, BadRow) or line.strip()
    )


def location(chunk: Chunk, number: int) -> str:
    """Where a row stands: `file:line`, or `file, row N` where a file has no lines."""
    return f"{chunk.file}:{number}" if chunk.unit == "line" else f"{chunk.file}, row {number}"


def count_rows(chunk: Chunk) -> int:
    """How many rows `rows_of` gives, without understanding them."""
    if chunk.kind == "arrow":
        return int(chunk.content.num_rows)
    if chunk.kind == "rows":
        return len(chunk.content)
    return len(_row_lines(chunk))


def part_of(chunk: Chunk, start: int, stop: int) -> Chunk:
    """The chunk's rows from `start` to below `stop`."""
    if chunk.kind == "arrow":
        return replace(chunk, content=chunk.content.slice(start, stop - start), first=chunk.first + start)
    if chunk.kind == "rows":
        return replace(chunk, content=chunk.content[start:stop])
    lines = _row_lines(chunk)[start:stop]
    content = b"\n".join(chunk.content.split(b"\n")[lines[0] : lines[-1] + 1]) if lines else b""
    return replace(chunk, content=content, first=chunk.first + (lines[0] if lines else 0))


def _row_lines(chunk: Chunk) -> list[int]:
    """Which lines of the chunk, from 0, are rows: all of a text, those that are not blank of a .jsonl."""
    lines = chunk.content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [number for number, line in enumerate(lines) if chunk.kind == "text" or line.strip()]


def _lines(content: bytes) -> list[str | BadRow]:
    try:
        lines: list[str | BadRow] = list(content.decode("utf-8").split("\n"))
    except UnicodeDecodeError:  # now each alone, to find those at fault
        lines = [_utf8(line) for line in content.split(b"\n")]
    if not lines[-1]:
        lines.pop()
    return [line[:-1] if isinstance(line, str) and line.endswith("\r") else line for line in lines]


def _utf8(line: bytes) -> str | BadRow:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        return _undecodable(error, line)


def _undecodable(error: UnicodeDecodeError, line: bytes) -> BadRow:
    problem = f"{NOT_UTF_8}: byte 0x{line[error.start]:02x} at column {error.start + 1}"
    return BadRow(problem, line[:SHOWN].decode("utf-8", "replace"))


def _json_row(line: str | BadRow) -> Row | BadRow:
    if isinstance(line, BadRow):
        return line
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow(f"{error.msg} (column {error.colno}){_cause(line)}", line[:SHOWN])
    except ValueError as error:  # a number of thousands of digits
        return BadRow(str(error), line[:SHOWN])
    except RecursionError:
        return BadRow("nested too deeply", line[:SHOWN])
    return value if isinstance(value, dict) else not_an_object(value)


def _cause(line: str) -> str:
    """What makes all lines of a file invalid."""
    if "\r" in line:
        return f"; {MAC_LINES}"
    return f"; {INDENTED}" if line.strip() == "{" else ""


def lone_surrogate(error: UnicodeEncodeError) -> str:
    escape = f"\\u{ord(error.object[error.start]):04x}"
    return f"its text contains a {LONE_SURROGATE}: the escape {escape} is half of a pair, which is not a character"


def not_an_object(value: Any) -> BadRow:
    """Valid JSON, but no row."""
    return BadRow("not an object with named columns", str(value)[:SHOWN])


def _decoded(row: Row | BadRow) -> Row | BadRow:
    """A row of which bytes that are no UTF-8 came through the reader as lone surrogates."""
    if isinstance(row, BadRow):
        return row
    for name, cell in row.items():
        if isinstance(cell, str) and not cell.isascii():
            try:
                cell.encode("utf-8")
            except UnicodeEncodeError as error:
                byte = ord(cell[error.start]) - 0xDC00  # as the reader wrote it; any other one is an escape
                problem = f"{NOT_UTF_8}: byte 0x{byte:02x} in column '{name}'"
                shown = cell[:SHOWN].encode("utf-8", "replace").decode()
                return BadRow(problem if 0x80 <= byte <= 0xFF else lone_surrogate(error), shown)
    return row


def _arrow_rows(batch: Any) -> list[Row | BadRow]:
    try:
        return list(batch.to_pylist())
    except (UnicodeDecodeError, ValueError):  # ValueError: a date beyond what Python can say
        return [_arrow_row(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _arrow_row(batch: Any) -> Row | BadRow:
    try:
        row: Row = batch.to_pylist()[0]
        return row
    except UnicodeDecodeError as error:
        return _undecodable(error, error.object)
    except ValueError as error:
        return BadRow(str(error))
