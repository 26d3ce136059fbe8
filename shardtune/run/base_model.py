"""Is this the base model that an adapter was trained on? What a run records of it, and how a model is compared with it.

No name tells: a folder moves, and another model may lie where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.durable import read_plain, replace_file
from shardtune.errors import UserInputError
from shardtune.run.folder import RECORD

_KEY = "base"  # in run.json
_SIZES = ("hidden_size", "num_hidden_layers")
_BLOCK = 64 << 10  # bytes at the beginning, middle and end of each file: all of a 100 GB model would take minutes


@dataclass(frozen=True)
class BaseModel:
    """A base model by its files.

    Attributes:
        name: As a config names it.
        folder: Absolute, if that is a local folder; None: a Hub name.
        types: `model_type` of its config and, in a multimodal one, of its language model.
        sizes: Of the language model, as its config says.
        fingerprint: Of config.json and of the weights: sizes, and three blocks of each file.
    """

    name: str
    folder: str | None
    types: frozenset[str]
    sizes: Mapping[str, int]
    fingerprint: str

    @classmethod
    def read(cls, name: str, folder: Path) -> BaseModel | None:
        """The model in a folder, or None where there is no readable config.json."""
        try:
            text = (folder / "config.json").read_bytes()
            config = json.loads(text)
            inner = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
            digest = hashlib.sha256(text)
            for file in sorted(folder.glob("*.safetensors")):
                _add_blocks(digest, file)
        except (OSError, ValueError, AttributeError):
            return None
        kinds = (config.get("model_type"), inner.get("model_type"))
        local = Path(name).expanduser().absolute()
        return cls(
            name,
            str(local) if local.is_dir() else None,
            frozenset(kind for kind in kinds if isinstance(kind, str)),
            {key: size for key in _SIZES if isinstance(size := inner.get(key, config.get(key)), int)},
            digest.hexdigest()[:32],
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "folder": self.folder, "types": sorted(self.types), "sizes": dict(self.sizes),
            "fingerprint": self.fingerprint,
        }  # fmt: skip

    def differences(self, other: BaseModel) -> str:
        """What shows that the two are different architectures; empty if nothing does."""
        if self.types and other.types and not self.types & other.types:
            trained, used = (" / ".join(sorted(model.types)) for model in (self, other))
            return f"model_type was {trained} in training and is {used} here"
        return "; ".join(
            f"{key} was {size} in training and is {other.sizes[key]} here"
            for key, size in self.sizes.items()
            if other.sizes.get(key, size) != size
        )


def _add_blocks(digest: Any, file: Path) -> None:
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest.update(f"{file.name} {size}\n".encode())
        for start in sorted({0, max(0, size // 2), max(0, size - _BLOCK)}):
            opened.seek(start)
            digest.update(opened.read(_BLOCK))


def record_base(run: Path, base: BaseModel) -> None:
    """Write it into the record of a run, which keeps it when the run resumes and ends.

    Raises:
        OSError: the disk is full, or the record is gone.
    """
    try:
        record = json.loads(read_plain(run / RECORD))
    except ValueError:  # damaged: the run will be read from its checkpoints
        return
    replace_file(run / RECORD, json.dumps({**record, _KEY: base.as_dict()}, indent=1) + "\n")


def kept_base(run: Path) -> dict[str, Any]:
    """The entry of a run's record, to be written again."""
    base = recorded_base(run)
    return {_KEY: base.as_dict()} if base is not None else {}


def recorded_base(run: Path) -> BaseModel | None:
    """What the training recorded of its base model; None for a run that did not."""
    try:
        found = json.loads(read_plain(run / RECORD))[_KEY]
        folder, sizes = found["folder"], found["sizes"]
        return BaseModel(
            str(found["name"]),
            str(folder) if folder is not None else None,
            frozenset(map(str, found["types"])),
            {str(key): int(size) for key, size in sizes.items()},
            str(found["fingerprint"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def compare_bases(adapter: Path, named: str | None, here: str, held_in: Path | None, *, option: str) -> str:
    """Was an adapter trained on this model? Returns a notice where that is not certain, else nothing.

    Args:
        adapter: Its folder, which may lie in the run that trained it.
        named: The model that it was trained on, where no run has recorded it.
        here: The model that is used with it.
        held_in: The folder of that; None: not on this machine yet.
        option: What chooses the model, for the error.

    Raises:
        UserInputError: it is another architecture.
    """
    recorded = next(filter(None, map(recorded_base, (adapter.parent, adapter.parent.parent, adapter))), None)
    own = BaseModel.read(here, held_in) if held_in is not None else None
    there = recorded.name if recorded is not None else named
    place = (recorded.folder or recorded.name) if recorded is not None else named
    if not there or not place or (recorded is not None and own is not None and own.fingerprint == recorded.fingerprint):
        return ""
    is_same_place = place == here or (held_in is not None and _same_folder(place, held_in))
    if is_same_place and (recorded is None or own is None):
        return ""
    known = recorded if recorded is not None else _on_disk(there)
    if known is not None and own is not None and (why := known.differences(own)):
        raise UserInputError(
            f"'{adapter}' was trained on another model: '{there}'.",
            why=f"'{here}' differs: {why}.",
            fix=f"Set {option} to the model that the adapter was trained on.",
        )
    if is_same_place:
        return f"The files of '{here}' have changed since training: results are only meaningful if its weights have not"
    return f"Trained on '{there}', using '{here}': results are only meaningful if these are the same weights"


def _same_folder(there: str, here: Path) -> bool:
    try:
        return Path(there).expanduser().samefile(here.expanduser())
    except (OSError, RuntimeError, ValueError):  # not a folder here, or not a path at all
        return False


def _on_disk(name: str) -> BaseModel | None:
    """A local folder, or a Hub name's in the cache; nothing is downloaded."""
    folder = cached_folder(name)
    return BaseModel.read(name, folder) if folder is not None else None


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Where a model's config.json lies on this machine; None: nowhere."""
    from huggingface_hub import try_to_load_from_cache

    try:
        if Path(name).expanduser().is_dir():
            return Path(name).expanduser()
        found = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    except (OSError, RuntimeError, ValueError):  # nothing that the Hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None
