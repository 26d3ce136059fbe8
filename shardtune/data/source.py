"""Where do the rows come from? Local files, folders, or a hub name, read through `datasets`."""

from __future__ import annotations

import logging
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
    if path.is_file() and path.stat().st_size == 0:
        raise UserInputError(f"The dataset file '{name}' is empty.", fix=f"Check {_KEY}.")
    if path.exists():
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
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    check_dataset_path(section)
    path = Path(section.dataset_name_or_path).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _split_from_disk(load_from_disk(str(path)), split, key, section)
        if path.is_file():
            files = {_bare(split): str(path)} if _bare(split) == "train" else {"train": str(path)}
            return load_dataset(_READERS[path.suffix.lower()], data_files=files, split=split)
        return load_dataset(section.dataset_name_or_path, section.dataset_config_name, split=split)
    except DatasetNotFoundError as error:
        raise UserInputError(
            f"The dataset '{section.dataset_name_or_path}' was not found.",
            why=_first_line(error),
            fix=f"Check {_KEY} and data.dataset_config_name; without a network, use a local file or folder.",
        ) from error
    except DatasetGenerationError as error:
        raise UserInputError(
            f"The dataset '{section.dataset_name_or_path}' could not be read.",
            why=_first_line(error.__cause__ or error),
            fix="Check that every line or row of the file is well formed.",
        ) from error
    except (ValueError, OSError) as error:
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


def _split_from_disk(loaded: Any, split: str, key: str, section: DataSection) -> Dataset:
    if not hasattr(loaded, "keys"):
        loaded = {"train": loaded}
    if split not in loaded:
        raise _unknown_split(section, split, key, list(loaded))
    return loaded[split]


def _read_error(section: DataSection, split: str, key: str, error: Exception) -> UserInputError:
    text = str(error)
    if "Unknown split" in text:
        found = text[text.find("[") :].strip("[]. ").replace("'", "") if "[" in text else ""
        return _unknown_split(section, split, key, [part.strip() for part in found.split(",") if part.strip()])
    return UserInputError(
        f"The dataset '{section.dataset_name_or_path}' could not be read.",
        why=_first_line(error),
        fix=f"Check {_KEY}, data.dataset_config_name and {key}.",
    )


def _unknown_split(section: DataSection, split: str, key: str, found: list[str]) -> UserInputError:
    return UserInputError(
        f"The dataset '{section.dataset_name_or_path}' has no split '{split}'.",
        why=f"It has: {', '.join(found)}." if found else "A single file has one split, called train.",
        fix=f"Set {key} to one of these (a slice such as train[:90%] works too).",
    )


def _bare(split: str) -> str:
    return split.split("[", 1)[0]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
