"""Where do the rows come from? Local files, folders, or a hub name, read through `datasets`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.config.schema import DataSection
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

_KEY = "data.dataset_name_or_path"
_READERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip


def check_dataset_path(section: DataSection) -> None:
    """Raise if the dataset is a local path that cannot be read as one. Needs neither torch nor `datasets`."""
    name = section.dataset_name_or_path
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() not in _READERS:
        raise UserInputError(
            f"'{name}' has the ending '{path.suffix}', which is not a known data format.",
            fix=f"Known endings: {' '.join(_READERS)}.",
        )
    if path.exists():
        files = list(_data_files(path))
        if files and not any(file.stat().st_size for file in files):
            raise UserInputError(
                f"The dataset '{name}' is empty.", why="Its files have no bytes in them.", fix=f"Check {_KEY}."
            )
        return
    written_like_a_path = (
        name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or path.suffix.lower() in _READERS
    )
    if written_like_a_path:
        raise UserInputError(
            f"The dataset '{name}' does not exist.",
            why=f"{_KEY} is written like a local path, so the hub is not asked. Looked at: {path.absolute()}",
            fix=f"Set {_KEY} to a file ({' '.join(_READERS)}), a folder of such files, or a hub name.",
        )


def read_split(section: DataSection, split: str, key: str) -> Dataset:
    """The rows of one split.

    Args:
        split: A split's name or a slice of one (`train[:90%]`).
        key: The config key that named it, for messages.

    Raises:
        UserInputError: no such dataset or split, or a file that cannot be parsed.
    """
    from datasets.exceptions import DatasetGenerationCastError, DatasetGenerationError, DatasetNotFoundError

    check_dataset_path(section)
    path = Path(section.dataset_name_or_path).expanduser()
    try:
        return _load(section, path, split)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise UserInputError(
            f"The dataset '{section.dataset_name_or_path}' was not found.",
            why=f"No file or folder of that name is here, and the hub says: {_one_line(error)}",
            fix=f"Check {_KEY} and data.dataset_config_name; without a network, use a local file or folder.",
        ) from error
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        columns_differ = isinstance(error, DatasetGenerationCastError) or "column names don't match" in str(cause)
        raise UserInputError(
            f"The dataset '{section.dataset_name_or_path}' could not be read.",
            why=_broken_json(path) or _one_line(cause),
            fix="Give all files of the folder the same columns, or keep those that differ in another folder."
            if columns_differ
            else "Check that every line or row of the file is well formed.",
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        raise _read_error(section, split, key, error) from error


def require_columns(dataset: Dataset, columns: list[str], key: str, split: str) -> None:
    """Raise if a column the config names is not there; the message lists those that are."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise UserInputError(
            f"The split '{split}' has no column {', '.join(repr(m) for m in missing)}, which {key} names.",
            why=f"Its columns are: {', '.join(dataset.column_names)}.",
            fix=f"Set {key} to what the data holds.",
        )


def _load(section: DataSection, path: Path, split: str) -> Dataset:
    from datasets import Features, Value, load_dataset, load_from_disk

    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _slice(load_from_disk(str(path)), split)
    if path.is_file():
        # A single file is one split, called train.
        source: dict[str, Any] = {"path": _READERS[path.suffix.lower()], "data_files": {"train": str(path)}}
    else:
        where = str(path) if path.is_dir() else section.dataset_name_or_path
        source = {"path": where, "name": section.dataset_config_name}
    if not any(file.suffix.lower() == ".csv" for file in _data_files(path)):
        return load_dataset(**source, split=split)
    # pandas would read NA and None as nothing, 007 as 7 and 1.50 as 1.5: a cell's text is what stands in the file.
    source |= {"keep_default_na": False, "na_values": [""]}
    columns = load_dataset(**source, split=split).column_names
    return load_dataset(**source, split=split, features=Features({name: Value("string") for name in columns}))


def _slice(loaded: Any, split: str) -> Dataset:
    """`split` of what `load_from_disk` gave, which (unlike `load_dataset`) knows no slices."""
    from datasets import ReadInstruction, concatenate_datasets

    splits = loaded if hasattr(loaded, "keys") else {"train": loaded}
    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    rows = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts if part.to > part.from_]
    if not rows:
        raise ValueError(f"{split} corresponds to no data")  # as `load_dataset` says it
    return concatenate_datasets(rows)


def _data_files(path: Path) -> Iterator[Path]:
    """The file itself, or the data files below a folder, in a fixed order."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return (file for file in files if file.is_file() and file.suffix.lower() in _READERS)


def _broken_json(path: Path) -> str | None:
    """File and line at which JSON breaks. (pyarrow names a row of the block it was reading: no line of the file.)"""
    for file in _data_files(path):
        if file.suffix.lower() not in (".json", ".jsonl"):
            continue
        try:
            broken = _broken_line(file)
        except UnicodeDecodeError as error:
            return f"{file} is not UTF-8: {error}."
        if broken:
            return f"{file}, line {broken}"
    return None


def _broken_line(file: Path) -> str | None:
    if file.suffix.lower() == ".json":
        try:
            json.loads(file.read_text(encoding="utf-8-sig"))
            return None
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # otherwise it holds one object per line, as a .jsonl does
                return f"{error.lineno}: {error.msg}."
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                return f"{number}: {error.msg}."
            if not isinstance(value, dict):
                return f"{number}: not an object with named columns."
    return None


def _read_error(section: DataSection, split: str, key: str, error: Exception) -> UserInputError:
    text = str(error)
    if "Unknown split" in text:
        found = text[text.find("[") :].strip("[]. ").replace("'", "") if "[" in text else ""
        return _unknown_split(section, split, key, [part.strip() for part in found.split(",") if part.strip()])
    if "corresponds to no data" in text:
        return UserInputError(
            f"The split '{split}' of the dataset '{section.dataset_name_or_path}' has no rows.",
            fix=f"Check the file, or set {key} to a larger part.",
        )
    return UserInputError(
        f"The dataset '{section.dataset_name_or_path}' could not be read.",
        why=_one_line(error),
        fix=f"Check {_KEY}, data.dataset_config_name and {key}.",
    )


def _unknown_split(section: DataSection, split: str, key: str, found: list[str]) -> UserInputError:
    return UserInputError(
        f"The dataset '{section.dataset_name_or_path}' has no split '{split}'.",
        why=f"It has: {', '.join(found)}." if found else "A single file has one split, called train.",
        fix=f"Set {key} to one of these (a slice such as train[:90%] works too).",
    )


def _one_line(error: BaseException) -> str:
    """An error of a library on one line, cut to what fits a screen."""
    text = " ".join(str(error).split())
    return (text[:400] + (" …" if len(text) > 400 else "")) or type(error).__name__
