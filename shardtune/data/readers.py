"""How does a file become chunks? Line by line or batch by batch; nothing here holds more than a chunk of the file.

A reader does not look into what it reads where it can (lines): `chunks.rows_of` does, in a worker process.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from shardtune.data.chunks import SHOWN, BadRow, Chunk, Row, not_an_object
from shardtune.errors import UserInputError

CHUNK_BYTES = 256 * 1024
CHUNK_ROWS = 512
_LONGEST_LINE = 64 * 2**20  # anything longer is not a row of a line-based file
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_INCOMPLETE = "may continue"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
_COMPRESSIBLE = ("jsonl", "json", "csv", "text")  # parquet and arrow compress inside, and are read from anywhere
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_LINES_LOOKED_AT = 50  # of a .csv, to see its delimiter
# What a file of text cannot begin with: (what begins so, what to do).
_FOREIGN_BEGINNINGS = {
    b"PAR1\x15": ("a parquet file", "Rename it to .parquet."),
    b"ARROW1\0": ("an arrow file", "Rename it to .arrow."),
    b"PK\x03\x04": ("a zip archive (or .xlsx)", "Unpack it, or save the sheet as .csv."),
    b"\x1f\x8b": ("compressed with gzip", "Add .gz to its name."),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "Add .zst to its name."),
    b"\xff\xfe": ("encoded as UTF-16", "Save it as UTF-8 (for example: iconv -f utf-16 -t utf-8)."),
    b"\xfe\xff": ("encoded as UTF-16", "Save it as UTF-8 (for example: iconv -f utf-16 -t utf-8)."),
}


@dataclass(frozen=True)
class DataFile:
    """A file on a disk, or behind a URL that fsspec knows."""

    name: str
    kind: str
    compression: str | None

    @classmethod
    def of(cls, name: str) -> DataFile | None:
        """None for an ending nobody here reads."""
        suffixes = [suffix.lower() for suffix in Path(name.partition("?")[0]).suffixes]
        compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
        kind = KINDS.get(suffixes[-2 if compression else -1], "") if len(suffixes) > bool(compression) else ""
        return cls(name, kind, compression) if kind and (not compression or kind in _COMPRESSIBLE) else None

    @property
    def is_url(self) -> bool:
        return "://" in self.name

    def size(self) -> int:
        if not self.is_url:
            return Path(self.name).stat().st_size
        import fsspec

        system, path = fsspec.core.url_to_fs(self.name)
        return int(system.size(path) or 0)

    @contextmanager
    def open(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """(the content, decompressed; the file as it lies there, whose position says how far the reader is)."""
        with _raw(self) as raw:
            if self.compression is None:
                if isinstance(raw, io.BufferedReader):
                    _refuse_foreign(self.name, raw.peek(8)[:8])
                yield raw, raw
                return
            if self.compression == "gzip" and isinstance(raw, io.BufferedReader):
                _refuse_uncompressed(self.name, raw.peek(2)[:2])
            import pyarrow

            # In C++, several members in one file included, and an end that is missing is an error.
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), self.compression)
            yield io.BufferedReader(stream, CHUNK_BYTES), raw

    def chunks(self) -> Iterator[Chunk]:
        """The rows of the file, in order."""
        return _READERS[self.kind](self)

    def delimiter(self) -> str:
        """What separates the cells of a .csv: a comma, unless only another sign makes columns of the header.

        Raises:
            UserInputError: more than one other sign does.
        """
        if ".tsv" in Path(self.name.lower().partition("?")[0]).suffixes:
            return "\t"
        with self.open() as (stream, _):
            lines = list(islice(_csv_text(stream), _LINES_LOOKED_AT))
        fitting = [sign for sign in DELIMITERS if _makes_columns(lines, sign)]
        if len(fitting) > 1 and "," not in fitting:
            raise UserInputError(
                f"The delimiter of '{self.name}' is ambiguous: {' or '.join(DELIMITERS[sign] for sign in fitting)}.",
                why=f"Each splits its header into columns: {lines[0].strip()[:SHOWN]}",
                fix="Save it comma-separated, with cells that contain commas in quotes.",
            )
        return "," if "," in fitting or not fitting else fitting[0]


def _refuse_foreign(name: str, beginning: bytes) -> None:
    for mark, (what, fix) in _FOREIGN_BEGINNINGS.items():
        if beginning.startswith(mark):
            raise UserInputError(f"'{name}' does not match its extension: it is {what}.", fix=fix)
    for encoding, zeros in (("utf-16le", beginning[1::2]), ("utf-16be", beginning[::2])):
        if beginning.count(0) == len(zeros) > 1 and not any(zeros):
            raise UserInputError(
                f"'{name}' is encoded as UTF-16.",
                why="Every other byte is NUL.",
                fix=f"Save it as UTF-8 (for example: iconv -f {encoding} -t utf-8).",
            )


def _refuse_uncompressed(name: str, beginning: bytes) -> None:
    if beginning and beginning != b"\x1f\x8b":
        raise UserInputError(
            f"'{name}' does not match its extension: it is not compressed with gzip.",
            fix="Remove .gz from its name, or copy the file again.",
        )


def _raw(file: DataFile) -> Any:
    if not file.is_url:
        return Path(file.name).open("rb", buffering=CHUNK_BYTES)
    import fsspec

    return fsspec.open(file.name, "rb").open()


def _line_chunks(file: DataFile, kind: Literal["jsonl", "text"]) -> Iterator[Chunk]:
    with file.open() as (stream, raw):
        line = 1
        while block := stream.read(CHUNK_BYTES):
            block += stream.readline()  # to the end of the last line
            if line == 1:
                block = block.removeprefix(b"\xef\xbb\xbf")
                if kind == "jsonl" and block.lstrip().startswith(b"["):  # a list of rows, as .json files hold
                    yield from _json_value_chunks(file)
                    return
            yield Chunk(file.name, kind, block, line, raw.tell())
            line += block.count(b"\n")


def _jsonl_chunks(file: DataFile) -> Iterator[Chunk]:
    return _line_chunks(file, "jsonl")


def _text_chunks(file: DataFile) -> Iterator[Chunk]:
    return _line_chunks(file, "text")


def _json_chunks(file: DataFile) -> Iterator[Chunk]:
    """A .json file may hold one object per line (then it is read as such), a list of objects, or one object."""
    with file.open() as (stream, _):
        first = b""
        while not first and (line := stream.readline(_LONGEST_LINE)):
            first = line.removeprefix(b"\xef\xbb\xbf").strip()
    try:
        is_lines = first.startswith(b"{") and isinstance(json.loads(first), dict)
    except ValueError:
        is_lines = False
    return _line_chunks(file, "jsonl") if is_lines else _json_value_chunks(file)


def _json_value_chunks(file: DataFile) -> Iterator[Chunk]:
    rows: list[tuple[int, Row | BadRow]] = []
    with file.open() as (stream, raw):
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")  # closes the file when it goes
        for number, value in _json_values(text):
            rows.append((number, value if isinstance(value, dict | BadRow) else not_an_object(value)))
            if len(rows) == CHUNK_ROWS:
                yield Chunk(file.name, "rows", rows, rows[0][0], raw.tell())
                rows = []
        if rows:
            yield Chunk(file.name, "rows", rows, rows[0][0], raw.tell())


def _json_values(stream: IO[str]) -> Iterator[tuple[int, Any]]:
    """(line, value) of each element of a list, or of each value where no list stands around them.

    Behind a mistake there is no telling where the next element starts, so the first one is also the last.
    """
    decoder, line, at, ended = json.JSONDecoder(), 1, 0, False
    text = stream.read(CHUNK_BYTES)
    listed = text.lstrip().startswith("[")
    if listed:
        at = text.index("[") + 1
        line += text.count("\n", 0, at)
    while True:
        begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # matches nothing, too
        line += text.count("\n", at, begin)
        try:
            value, at = decoder.raw_decode(text, begin)
            if at == len(text) and not ended:
                raise json.JSONDecodeError(_INCOMPLETE, text, at)  # a number might
        except json.JSONDecodeError as error:
            # Where the text ends in the middle of a value, more of the file may complete it.
            more = "" if ended else stream.read(max(CHUNK_BYTES, len(text)))
            if not more and (ended or error.msg != _INCOMPLETE):
                if text[begin:].strip() != ("]" if listed else ""):
                    yield line + text.count("\n", begin, error.pos), _broken_json(error, text)
                return
            text, at, ended = text[begin:] + more, 0, not more
            continue
        except ValueError as error:
            yield line, BadRow(str(error))
            return
        yield line, value
        line += text.count("\n", begin, at)


def _broken_json(error: json.JSONDecodeError, text: str) -> BadRow:
    start = text.rfind("\n", 0, error.pos) + 1
    problem = f"{error.msg} (column {error.pos - start + 1}); the rest of the file is not read"
    return BadRow(problem, text[start : start + SHOWN].split("\n")[0])


def _csv_chunks(file: DataFile) -> Iterator[Chunk]:
    # A cell is the text that stands there: pandas would read NA as nothing, 007 as 7 and 1.50 as 1.5.
    csv.field_size_limit(sys.maxsize)
    rows: list[tuple[int, Row | BadRow]] = []
    delimiter = file.delimiter()
    with file.open() as (stream, raw):
        text = _csv_text(stream)  # closes the file when it goes
        for line, row in _csv_rows(csv.reader(text, delimiter=delimiter, strict=True), file, delimiter):
            rows.append((line, row))
            if len(rows) == CHUNK_ROWS:
                yield Chunk(file.name, "rows", rows, rows[0][0], raw.tell())
                rows = []
        if rows:
            yield Chunk(file.name, "rows", rows, rows[0][0], raw.tell())


def _csv_text(stream: IO[bytes]) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _makes_columns(lines: list[str], delimiter: str) -> bool:
    """Whether the header falls into several cells, and most rows into as many."""
    csv.field_size_limit(sys.maxsize)
    widths = [len(cells) for cells in csv.reader(lines, delimiter=delimiter) if cells]
    alike = sum(width == widths[0] for width in widths[1:])
    return bool(widths) and widths[0] > 1 and 2 * alike >= len(widths) - 1


def _csv_rows(reader: Any, file: DataFile, delimiter: str) -> Iterator[tuple[int, Row | BadRow]]:
    header: list[str] | BadRow | None = []
    while header == []:  # blank lines before it
        header = _csv_row(reader)
    before = reader.line_num
    if isinstance(header, BadRow):
        yield 1, header
        return
    if any("\udc80" <= sign <= "\udcff" for name in header or () for sign in name):
        yield before, BadRow("the header is not UTF-8")
        return
    _refuse_repeated(file.name, header or ())
    if header and header[0].lstrip().startswith("{"):
        raise UserInputError(
            f"'{file.name}' holds JSON, not CSV.", why=f"It begins with {header[0][:SHOWN]}", fix="Rename it to .jsonl."
        )
    while (cells := _csv_row(reader)) is not None:
        line, before = before + 1, reader.line_num  # a quoted cell may span lines
        if isinstance(cells, BadRow):
            yield line, cells
        elif len(cells) == len(header or ()):
            yield line, {name: cell or None for name, cell in zip(header or (), cells, strict=True)}
        elif cells:
            problem = f"{len(cells)} cells, but the header has {len(header or ())}"
            quote = f" (a cell that contains {delimiter!r} must be quoted)" if len(cells) > len(header or ()) else ""
            yield line, BadRow(problem + quote, delimiter.join(cells)[:SHOWN])


def _refuse_repeated(name: str, columns: Sequence[str]) -> None:
    """One of two columns of the same name would be lost. (Without a name, there are often several, all empty.)"""
    repeated = [column for column, times in Counter(columns).items() if times > 1 and column]
    if repeated:
        raise UserInputError(
            f"'{name}' has more than one column named {repeated[0]!r}.",
            why=f"Its columns are: {', '.join(columns)}.",
            fix="Rename or remove one of them.",
        )


def _csv_row(reader: Any) -> list[str] | BadRow | None:
    try:
        cells: list[str] | None = next(reader, None)
        return cells
    except csv.Error as error:  # the reader goes on with the next line
        return BadRow('a quoted cell (") is not closed' if "unexpected end" in str(error) else str(error))


def _parquet_chunks(file: DataFile) -> Iterator[Chunk]:
    from pyarrow import parquet

    with _native(file) as source:
        opened = parquet.ParquetFile(source, pre_buffer=False)
        _refuse_repeated(file.name, opened.schema_arrow.names)
        size, rows = file.size(), max(opened.metadata.num_rows, 1)
        first = 1
        for batch in opened.iter_batches(batch_size=CHUNK_ROWS):
            read = first - 1 + batch.num_rows
            yield Chunk(file.name, "arrow", batch, first, size * read // rows, unit="row")
            first += batch.num_rows


def _arrow_chunks(file: DataFile) -> Iterator[Chunk]:
    import pyarrow

    with _native(file) as source:
        first = 1
        for whole in _arrow_batches(pyarrow, source):
            _refuse_repeated(file.name, whole.schema.names)
            for start in range(0, whole.num_rows, CHUNK_ROWS):
                batch = whole.slice(start, CHUNK_ROWS)
                yield Chunk(file.name, "arrow", batch, first, source.tell(), unit="row")
                first += batch.num_rows


def _native(file: DataFile) -> Any:
    """The file as pyarrow reads it fastest."""
    import pyarrow

    return _raw(file) if file.is_url else pyarrow.OSFile(file.name)


def _arrow_batches(pyarrow: Any, stream: Any) -> Iterator[Any]:
    """Arrow has two containers: a stream (what `datasets` writes) and a file that begins with ARROW1."""
    magic = stream.read(6)
    stream.seek(0)
    if magic == b"ARROW1":
        opened = pyarrow.ipc.open_file(stream)
        yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(stream)


_READERS: dict[str, Callable[[DataFile], Iterator[Chunk]]] = {
    "jsonl": _jsonl_chunks, "json": _json_chunks, "csv": _csv_chunks, "text": _text_chunks,
    "parquet": _parquet_chunks, "arrow": _arrow_chunks,
}  # fmt: skip
