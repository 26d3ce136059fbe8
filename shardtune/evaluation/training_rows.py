"""Are evaluated rows those the model was trained on, and are they what they were then? By tokens, from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.data.cache import cache_folder
from shardtune.data.prepare import SET, PreparedSet
from shardtune.data.source import sources_of
from shardtune.errors import UserInputError
from shardtune.model.locate import same_name
from shardtune.report.read import Tail, mapping, text, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardtune.config.schema import DataSection
    from shardtune.data.prepared import Prepared

_EVENTS = "events-rank0.jsonl"


@dataclass(frozen=True)
class TrainedData:
    """What a run was trained on.

    Attributes:
        counts: Of its validation rows, as its events tell.
        prepared: The rows themselves, where they are still on this disk.
    """

    counts: dict[str, Any] = field(default_factory=dict)
    prepared: PreparedSet | None = None

    @classmethod
    def of(cls, run: Path, section: DataSection) -> TrainedData:
        """Nothing is prepared for it: rows that have left the cache are not known."""
        events = Tail(run / _EVENTS).read().events  # data come near the beginning of the file
        event = next((one for one in events if one.get("event") == "data"), {})
        folder = Path(text(event.get("folder")))
        places = (folder, cache_folder(section) / folder.name) if folder.name else ()
        return cls(mapping(event.get("validation")), next(filter(None, map(_opened, places)), None))

    def differs_from(self, validation: Prepared) -> str:
        """What to say if these are no longer the validation rows the run had; empty where they are, or nobody knows."""
        then = whole(self.counts.get("rows"))
        if self.prepared is not None and self.prepared.val is not None:
            if self.prepared.val.manifest["files"] == validation.manifest["files"]:
                return ""
            then = len(self.prepared.val)
        elif then is None or all(self.counts.get(name) == getattr(validation.counts, name) for name in _COUNTED):
            return ""
        now = len(validation)
        found = f"{now:,} validation rows now, {then:,} then" if now != then else "other validation rows than then"
        return f"The data has changed since training (its files or the tokenizer): {found}."


_COUNTED = ("read", "rows", "tokens", "supervised")


def _opened(folder: Path) -> PreparedSet | None:
    if not (folder / SET).is_file():
        return None
    try:
        return PreparedSet.open(folder)
    except (UserInputError, OSError):
        return None


def is_training_split(section: DataSection, trained: DataSection) -> bool:
    """Whether the rows of `section` are read from a file or split that the run was trained on."""
    splits = {(source.path, source.config_name, source.split or trained.train_split) for source in sources_of(trained)}
    return any(
        same_name(source.path, path) and source.config_name == name and (source.split or section.train_split) == split
        for source in sources_of(section)
        for path, name, split in splits
    )


def rows_in(chosen: Sequence[int], rows: Prepared, training: Prepared) -> int:
    """How many of the chosen rows have the tokens of a training row.

    Token ids are compared only of training rows with a length and a number of supervised tokens that occur among the
    chosen, so a large training set is not read whole.
    """
    wanted: dict[bytes, int] = {}
    for number in chosen:
        key = rows.row(number)[0].tobytes()
        wanted[key] = wanted.get(key, 0) + 1
    found = 0
    shapes = _shapes(rows)[list(chosen)]
    for number in np.flatnonzero(np.isin(_shapes(training), shapes)).tolist():
        found += wanted.pop(training.row(number)[0].tobytes(), 0)
        if not wanted:
            break
    return found


def _shapes(rows: Prepared) -> NDArray[np.int64]:
    return rows.lengths.astype(np.int64) << 32 | rows.supervised.astype(np.int64)
