"""Where do the rows come from? Files, globs, folders, URLs or hub names, alone or as a weighted mixture.

Files are read by our own readers, a chunk at a time; folders written by `datasets` and hub names come through it.
"""

from __future__ import annotations

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.config.schema import DataSection
from shardtune.data.chunks import (
    INDENTED,
    LONE_SURROGATE,
    MAC_LINES,
    NOT_UTF_8,
    BadRow,
    Chunk,
    Row,
    count_rows,
    location,
    part_of,
    rows_of,
)
from shardtune.data.readers import CHUNK_ROWS, DELIMITERS, KINDS, DataFile
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from datasets import Dataset

_KEY = "data.dataset_name_or_path"
_NAMED = 3  # files in a note
_LOOKED_INTO = 16  # unread files of a folder, and rows of each, to see whether they are data
# What `datasets` takes for no data in a folder, besides hidden files and folders.
_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SPLIT_WORDS = {
    "train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation",
}  # fmt: skip
_SHARDED = re.compile(r"data/.*-\d{5}-of-\d{5}.*")  # names a split of any name
_FIXES = {
    NOT_UTF_8: "Save the file as UTF-8 (for example: iconv -f latin1 -t utf-8)",
    LONE_SURROGATE: "Remove the escape or complete the pair (such as \\ud83d\\ude00)",
    MAC_LINES: "Convert its line ends (for example: tr '\\r' '\\n')",
    INDENTED: "Write one object per line (for example: jq -c .), or rename the file to .json",
}
_ENDINGS = f"{' '.join(KINDS)}; .jsonl .json .csv .tsv .txt also with .gz or .zst"


@dataclass(frozen=True)
class Source:
    """One entry of `data.dataset_name_or_path`."""

    path: str
    weight: float = 1.0
    config_name: str | None = None
    split: str | None = None


def sources_of(section: DataSection) -> list[Source]:
    """The sources a config names, one or a mixture."""
    given = section.dataset_name_or_path
    entries = [given] if isinstance(given, str) else given
    return [
        Source(entry, config_name=section.dataset_config_name)
        if isinstance(entry, str)
        else Source(entry.path, entry.weight, entry.config_name or section.dataset_config_name, entry.split)
        for entry in entries
    ]


def location_of(source: Source) -> str:
    """Where a source lies, from whatever folder a command is run; a hub name and a URL as they are."""
    path = Path(source.path).expanduser()
    return (
        str(path.absolute()) if "://" not in source.path and (path.exists() or _is_glob(source.path)) else source.path
    )


def check_dataset_path(section: DataSection) -> None:
    """Raise if a source is a local path that cannot be read as one. Needs no torch, and `datasets` only for a folder
    without any file that is read here."""
    for source in sources_of(section):
        if "://" not in source.path:
            _check_local(source)


def _check_local(source: Source) -> None:
    name = source.path
    path = Path(name).expanduser()
    found = local_files(name)
    if path.is_file() and not found:
        raise UserInputError(
            f"'{name}' has the extension '{path.suffix}', which is not a supported data format.",
            fix=f"Supported extensions: {_ENDINGS}.",
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserInputError(
            f"'{name}' is neither a regular file nor a folder.",
            why="Data is read more than once, which a pipe or device does not allow.",
            fix="Write its content to a file.",
        )
    closed = next((file.name for file in found if not os.access(file.name, os.R_OK)), None)
    if closed is not None:
        raise UserInputError(
            f"No permission to read '{closed}' (user {os.geteuid()}).", fix=f"Change its permissions, or {_KEY}."
        )
    if found and not any(file.size() for file in found):
        raise UserInputError(f"The dataset '{name}' is empty.", why="Its files have no content.", fix=f"Check {_KEY}.")
    if path.is_dir() and not found:
        with reading(source, _KEY):
            _file_splits(source, path)  # `datasets` reads more kinds of files, and says so if there are none
    if path.exists() or found:
        return
    if _is_glob(name):
        raise UserInputError(
            f"No data file matches '{name}'.",
            why=f"Searched in: {Path.cwd()}. Supported extensions: {_ENDINGS}.",
            fix=f"Check {_KEY}; ** matches folders at any depth.",
        )
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or DataFile.of(name):
        raise UserInputError(
            f"The dataset '{name}' does not exist.",
            why=f"{_KEY} looks like a local path, so the Hub is not queried. Looked at: {path.absolute()}",
            fix=f"Set {_KEY} to a file ({_ENDINGS}), a glob, a folder of such files, or a Hub name.",
        )


class Split(ABC):
    """The rows of one split of one source; they can be read any number of times, always in the same order.

    Attributes:
        name: Split as it was asked for, slice included.
        key: Config key that named it, for messages.
    """

    source: Source
    name: str
    key: str

    @property
    @abstractmethod
    def total(self) -> int:
        """How far `Chunk.position` goes."""

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """The rows, in order."""

    def notes(self) -> list[str]:
        """What one should know about how it is read."""
        return []

    def sample(self, count: int) -> list[Row]:
        """The first rows that can be read, at most `count`.

        Raises:
            UserInputError: there is no row at all, or none that can be read.
        """
        good: list[Row] = []
        first_bad: UserInputError | None = None
        for chunk in self.chunks():
            for number, row in rows_of(chunk):
                if not isinstance(row, BadRow):
                    good.append(row)
                elif first_bad is None:
                    first_bad = self._none_readable(chunk, number, row)
                if len(good) == count:
                    return good
        if not good:
            raise first_bad or _no_rows(self.source, self.name, self.key)
        return good

    def _none_readable(self, chunk: Chunk, number: int, bad: BadRow) -> UserInputError:
        return UserInputError(
            f"No row of the split '{self.name}' of the dataset '{self.source.path}' can be read.",
            why=f"The first, {location(chunk, number)}: {_why_bad(bad)}",
            fix=f"{_fix(bad)}; data.on_error: skip needs at least one row that can be read.",
        )


@dataclass(frozen=True)
class FileSplit(Split):
    """Files, or a part of their rows."""

    source: Source
    name: str
    key: str
    files: tuple[DataFile, ...]
    ranges: tuple[tuple[int, int], ...] | None = None  # rows from, to below; None = all

    @property
    def total(self) -> int:
        return sum(file.size() for file in self.files)

    def notes(self) -> list[str]:
        with reading(self.source, self.key):
            signs = {file.delimiter() for file in self.files if file.kind == "csv"}
            unread = list(_unread_files(self.source))
        named = " or ".join(name for sign, name in DELIMITERS.items() if sign in signs)
        separated = [f"cells are separated by {named}"] if signs - {","} else []
        return separated + ([f"files not read: {some_of(unread)}"] if unread else [])

    def chunks(self) -> Iterator[Chunk]:
        with reading(self.source, self.key):
            if self.ranges is None:
                yield from self._all()
            for start, stop in self.ranges or ():
                yield from self._range(start, stop)

    def count(self) -> int:
        with reading(self.source, self.key):
            return sum(count_rows(chunk) for chunk in self._all())

    def _all(self) -> Iterator[Chunk]:
        before = 0
        for file in self.files:
            for chunk in file.chunks():
                yield replace(chunk, position=before + chunk.position) if before else chunk
            before += file.size()

    def _range(self, start: int, stop: int) -> Iterator[Chunk]:
        seen = 0
        for chunk in self._all():
            rows = count_rows(chunk)
            if seen < stop and seen + rows > start:
                yield part_of(chunk, max(start - seen, 0), min(stop - seen, rows))
            seen += rows
            if seen >= stop:
                return


@dataclass(frozen=True)
class TableSplit(Split):
    """A split that `datasets` holds."""

    source: Source
    name: str
    key: str
    table: Dataset

    @property
    def total(self) -> int:
        return len(self.table)

    def chunks(self) -> Iterator[Chunk]:
        table = self.table.with_format(None)  # saved with a tensor format, it would give tensors
        with reading(self.source, self.key):
            for start in range(0, len(table), CHUNK_ROWS):
                columns = table[start : start + CHUNK_ROWS]
                cells = enumerate(zip(*columns.values(), strict=True), start=start + 1)
                rows = [(number, dict(zip(columns, row, strict=True))) for number, row in cells]
                yield Chunk(self.source.path, "rows", rows, start + 1, start + len(rows), unit="row")


def open_split(source: Source, split: str, key: str) -> Split:
    """One split of a source, found but not read.

    Args:
        split: A split's name or a slice of one (`train[:90%]`).
        key: The config key that named it, for messages.

    Raises:
        UserInputError: no such dataset or split, or a file that cannot be read.
    """
    if "://" not in source.path:
        _check_local(source)
    with reading(source, key, split):
        path = Path(source.path).expanduser()
        if _written_by_datasets(path):
            from datasets import load_from_disk

            return TableSplit(source, split, key, _slice(load_from_disk(str(path)), split))
        splits = _file_splits(source, path)
        if splits is not None:
            return _file_split(source, splits, split, key)
        from datasets import load_dataset

        where = _as_datasets_takes_it(path) if path.is_dir() else source.path
        return TableSplit(source, split, key, load_dataset(where, source.config_name, split=split))


def split_files(source: Source, split: str, key: str) -> Sequence[DataFile] | None:
    """The files of a split of a source that is no URL; None where only `datasets` can read them.

    `datasets` is imported only where the files' names do not show the split.

    Raises:
        UserInputError: there is no such split, as `open_split` says it.
    """
    path = Path(source.path).expanduser()
    if _written_by_datasets(path):
        open_split(source, split, key)  # maps the files, and reads none of them
        return None
    named = _splits_by_name(path) if path.is_dir() else None
    if named is not None and split in named:
        return named[split]
    with reading(source, key, split):
        splits = _file_splits(source, path)
        return _file_split(source, splits, split, key).files if splits is not None else None


def unread_data(source: Source, columns: Sequence[str], *, lines: bool) -> list[str]:
    """Files of a folder that no split reads though they hold rows with these columns; not a tokenizer.json or notes.

    Args:
        lines: Lines of text files are read, so that any text file may be data.
    """
    files = [file for file in _unread_files(source).values() if lines or file.kind != "text"]
    return [file.name for file in files[:_LOOKED_INTO] if set(columns) <= _first_columns(file)]


def some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def has_files(source: Source, split: str) -> bool:
    """Whether files here are that split."""
    try:
        return "://" not in source.path and split_files(source, split, "data.val_split") is not None
    except UnknownSplit:
        return False


def has_split(source: Source, split: str, key: str) -> bool:
    """Whether the source has a split of that name; any other trouble is raised."""
    try:
        open_split(source, split, key)
    except UserInputError as error:
        if isinstance(error, UnknownSplit):
            return False
        raise
    return True


class UnknownSplit(UserInputError):
    """The dataset is there, the split is not."""


def bad_row_error(chunk: Chunk, number: int, bad: BadRow) -> UserInputError:
    """What is said about a row that stops the reading."""
    return UserInputError(
        f"{location(chunk, number)} cannot be used.",
        why=_why_bad(bad),
        fix=f"{_fix(bad)}, or set data.on_error: skip to skip such rows (they are counted).",
    )


def _why_bad(bad: BadRow) -> str:
    from shardtune.data.show_rows import visible

    return bad.message[:1].upper() + bad.message[1:] + (f": {visible(_one_line(bad.shown))}" if bad.shown else ".")


def _fix(bad: BadRow) -> str:
    return next((fix for problem, fix in _FIXES.items() if problem in bad.message), "Fix it")


def local_files(name: str) -> list[DataFile]:
    """The file itself, what a glob matches, or the data files below a folder, in a fixed order."""
    path = Path(name).expanduser()
    if path.is_dir():
        names = [str(file) for file in path.rglob("*") if not _is_no_data(file.relative_to(path))]
    elif path.exists() or not _is_glob(name):
        names = [str(path)]
    else:
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [file for file in map(DataFile.of, sorted(names)) if file and Path(file.name).is_file()]


def _is_no_data(file: Path) -> bool:
    """Whether `datasets` passes over a file of a folder."""
    hidden = any(part.startswith(".") for part in file.parts) or any(part.startswith("__") for part in file.parts[:-1])
    return hidden or file.name in _NO_DATA


def _written_by_datasets(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _file_splits(source: Source, path: Path) -> Mapping[str, list[DataFile]] | None:
    """The files of each split; None where `datasets` has to read them."""
    if "://" in source.path:
        return {"train": _remote_files(source.path)}
    if not path.is_dir():
        files = local_files(source.path)
        return {"train": files} if files else None  # a file or a glob is one split, called train
    from datasets import load_dataset_builder

    # `datasets` knows which file belongs to which split: by name, by folder, or as a README's header says.
    found = load_dataset_builder(_as_datasets_takes_it(path), source.config_name).config.data_files or {}
    splits = {str(name): [DataFile.of(str(file)) for file in files] for name, files in found.items()}
    known = {name: [file for file in files if file] for name, files in splits.items()}
    return known if known and known == splits else None


def _splits_by_name(folder: Path) -> dict[str, list[DataFile]] | None:
    """The files of each split, where their names alone show it, by the rules of `datasets`: words in the names of
    folders, else of files; without any, all of them are train. None where there is more to it."""
    names = {str(Path(file.name).relative_to(folder)): file for file in local_files(str(folder))}
    readme = folder / "README.md"
    if (
        any(_SHARDED.fullmatch(name) or Path(name).suffix != Path(name).suffix.lower() for name in names)
        or (folder / ".huggingface.yaml").is_file()
        or (readme.is_file() and b"configs:" in readme.read_bytes())
    ):
        return None
    folders = {name: f"{Path(name).parent}/" for name in names}
    files = {name: Path(name).name for name in names}
    found = _by_words(names, folders) or _by_words(names, files) or ({"train": list(names.values())} if names else {})
    kinds = {file.kind for split in found.values() for file in split}
    return found if len(kinds) == 1 else None  # of several, the most frequent is read


def _by_words(files: Mapping[str, DataFile], texts: Mapping[str, str]) -> dict[str, list[DataFile]]:
    splits = {
        split: [file for name, file in files.items() if re.search(f"(^|[-._ 0-9/])({words})[-._ 0-9/]", texts[name])]
        for split, words in _SPLIT_WORDS.items()
    }
    return {split: found for split, found in splits.items() if found}


def _as_datasets_takes_it(folder: Path) -> str:
    """`datasets` needs the folder's own name, which `.` and `..` have not; and it refuses a folder NAME that contains
    NAME.py as an old dataset script, also one with data, unless the path ends otherwise."""
    return f"{folder.resolve()}/." if local_files(str(folder)) else str(folder.resolve())


def _unread_files(source: Source) -> dict[str, DataFile]:
    """Data files of a folder that are in none of its splits, by their names in it: `datasets` takes those of the most
    frequent ending, and, where some are named after a split, only these."""
    path = Path(source.path).expanduser()
    if not path.is_dir() or _written_by_datasets(path):
        return {}
    splits = _splits_by_name(path) or _file_splits(source, path) or {}
    read = {Path(file.name).resolve() for files in splits.values() for file in files}
    left = {str(Path(file.name).relative_to(path)): file for file in local_files(source.path)}
    return {name: file for name, file in left.items() if Path(file.name).resolve() not in read}


def _first_columns(file: DataFile) -> set[str]:
    """The columns of its first rows; none where it cannot be read."""
    with suppress(UserInputError), reading(Source(file.name), _KEY):
        rows = islice((row for chunk in file.chunks() for _, row in rows_of(chunk)), _LOOKED_INTO)
        return {name for row in rows if not isinstance(row, BadRow) for name in row}
    return set()


def _remote_files(url: str) -> list[DataFile]:
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    names = [system.unstrip_protocol(name) for name in sorted(system.glob(path))] if _is_glob(path) else [url]
    files = [file for file in map(DataFile.of, names) if file]
    if not files:
        raise UserInputError(
            f"There is no data file at '{url}'.",
            why=f"Supported extensions: {_ENDINGS}.",
            fix=f"Set {_KEY} to files or a glob.",
        )
    return files


def _file_split(source: Source, splits: Mapping[str, list[DataFile]], split: str, key: str) -> FileSplit:
    if split in splits:
        return FileSplit(source, split, key, tuple(splits[split]))
    from datasets import ReadInstruction

    parts = ReadInstruction.from_spec(split).to_absolute(_Lengths(source, splits, key))
    names = {part.splitname for part in parts}
    if len(names) > 1:
        raise ValueError(f"{split} joins several splits; list each as a separate source")
    ranges = tuple((part.from_, part.to) for part in parts if part.to > part.from_)
    if not ranges:
        raise _no_rows(source, split, key)
    return FileSplit(source, split, key, tuple(splits[names.pop()]), ranges)


class _Lengths(Mapping[str, int]):
    """Rows of each split, counted only when a slice asks for them."""

    def __init__(self, source: Source, splits: Mapping[str, list[DataFile]], key: str) -> None:
        self.source, self.splits, self.key = source, splits, key

    def __getitem__(self, name: str) -> int:
        return FileSplit(self.source, name, self.key, tuple(self.splits[name])).count()

    def __contains__(self, name: object) -> bool:
        return name in self.splits

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits)

    def __len__(self) -> int:
        return len(self.splits)


def _slice(loaded: Any, split: str) -> Dataset:
    """`split` of what `load_from_disk` gave, which (unlike `load_dataset`) knows no slices."""
    from datasets import ReadInstruction, concatenate_datasets

    splits = loaded if hasattr(loaded, "keys") else {"train": loaded}
    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    rows = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts if part.to > part.from_]
    if not rows:
        raise ValueError(f"{split} corresponds to no data")  # as `load_dataset` says it
    return concatenate_datasets(rows) if len(rows) > 1 else rows[0]


@contextmanager
def reading(source: Source, key: str, split: str = "") -> Iterator[None]:
    """Turns errors of the libraries that read into UserInputErrors."""
    try:
        yield
    except UserInputError:
        raise
    except ImportError as error:  # a URL whose file system is not installed
        raise UserInputError(
            f"The dataset '{source.path}' cannot be opened.",
            why=_one_line(error),
            fix="Install the missing package, or copy the files to a local disk.",
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        raise _read_error(source, split, key, error) from error


def _read_error(source: Source, split: str, key: str, error: Exception) -> UserInputError:
    text = str(error)
    if "Unknown split" in text:
        found = text[text.find("[") :].strip("[]. ").replace("'", "") if "[" in text else ""
        return _unknown_split(source, split, key, [part.strip() for part in found.split(",") if part.strip()])
    if "corresponds to no data" in text:
        return _no_rows(source, split, key)
    if isinstance(error, ConnectionError) or type(error).__name__ == "DatasetNotFoundError":
        return UserInputError(
            f"The dataset '{source.path}' was not found.",
            why=f"There is no local file or folder of that name, and the Hub reports: {_one_line(error)}",
            fix=f"Check {_KEY} and data.dataset_config_name; without a network, use a local file or folder.",
        )
    if type(error).__name__ in ("EmptyDatasetError", "DataFilesNotFoundError"):
        return _no_data_files(source, error)
    return UserInputError(
        f"The dataset '{source.path}' could not be read.",
        why=_one_line(error.__cause__ or error),
        fix=f"Check {_KEY}, data.dataset_config_name and {key}, and that the file is complete.",
    )


def _no_data_files(source: Source, error: Exception) -> UserInputError:
    path = Path(source.path).expanduser()
    capitals = next((file.name for file in local_files(source.path) if path.is_dir()), None)
    return UserInputError(
        f"The dataset '{source.path}' contains no data files.",
        why=_one_line(error),
        fix=f"Supported extensions: {_ENDINGS}."
        if capitals is None
        else f"Rename '{capitals}': in a folder, extensions and the names of splits must be lower-case (train.jsonl).",
    )


def _no_rows(source: Source, split: str, key: str) -> UserInputError:
    return UserInputError(
        f"The split '{split}' of the dataset '{source.path}' has no rows.",
        fix=f"Check the file, or set {key} to a larger slice.",
    )


def _unknown_split(source: Source, split: str, key: str, found: list[str]) -> UserInputError:
    unread = list(_unread_files(source))
    return UnknownSplit(
        f"The dataset '{source.path}' has no split '{split}'.",
        why=f"It has: {', '.join(found)}."
        + (" A single file or a glob is one split named train." if found == ["train"] else "")
        + (f" Files in no split: {some_of(unread)}." if unread else ""),
        fix=f"Set {key} to one of these (slices such as train[:90%] work too).",
    )


def _one_line(error: BaseException | str) -> str:
    """An error of a library, or what a file holds, on one line, cut to what fits a screen."""
    text = " ".join(str(error).split())
    return (text[:400] + (" …" if len(text) > 400 else "")) or type(error).__name__
