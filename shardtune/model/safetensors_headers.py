"""Which tensors does a checkpoint contain, and where? Reads safetensors headers only, and reports damage by name."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_METADATA = "__metadata__"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_AGAIN = "Copy or download it again."
_POINTER = b"version https://git-lfs"
_LARGEST_HEADER = 1 << 28  # a damaged length field must not make us read gigabytes

FLOAT8 = "float8_e4m3fn"  # of weights; other forms of float8 hold scales
# torch's name of each dtype, and its bytes.
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": (FLOAT8, 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip
DTYPE_CODES = {name: code for code, (name, _) in _DTYPES.items()}  # the other way round: for writing


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: `nbytes` from `offset` on in `file`, row-major. `dtype` is torch's name of it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # headers are read where there is none, too

        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by its stored name.

    Raises:
        UserInputError: a file is missing, truncated or no safetensors file, or the index disagrees with the files.
    """
    index = folder / INDEX
    listed = _read_index(index) if index.is_file() else None
    files = (
        sorted(folder / file for file in set(listed.values())) if listed is not None else _files_without_index(folder)
    )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserInputError(
            f"The checkpoint '{folder}' is incomplete: {_some(missing)} missing.",
            why=f"{INDEX} names {len(files)} files." if listed is not None else "",
            fix="Copy or download the missing files.",
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise UserInputError(
                    f"Tensor '{tensor.name}' is stored twice: in {tensors[tensor.name].file.name} and in {file.name}.",
                    fix="Remove files that do not belong to the checkpoint, or download it into an empty folder.",
                )
            tensors[tensor.name] = tensor
    if listed is not None:
        _compare(folder, listed, tensors)
    return tensors


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, whose size matches its header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start and _POINTER.startswith(start):
            raise UserInputError(
                f"'{file}' is a git-lfs pointer, not the weights.", fix="Run git lfs pull in that folder."
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LARGEST_HEADER + 1
        if length > min(size - 8, _LARGEST_HEADER):
            raise _damaged(file, f"{size:,} bytes, too short for its own header")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        tensors = [stored_tensor(file, name, entry, 8 + length) for name, entry in header.items() if name != _METADATA]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"its header cannot be read ({error})") from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=8 + length)
    if end != size:
        raise _damaged(file, f"it has {size:,} bytes, its header describes {end:,}")
    return tensors


def stored_tensor(file: Path, name: str, entry: Mapping[str, Any], data: int) -> StoredTensor:
    """One entry of a header whose data begins at byte `data` of the file.

    Raises:
        ValueError, KeyError, TypeError: the entry is damaged.
    """
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"'{name}' has the unknown dtype {entry['dtype']}")
    dtype, size = _DTYPES[entry["dtype"]]
    tensor = StoredTensor(name, file, dtype, tuple(entry["shape"]), data + begin, end - begin)
    if math.prod(tensor.shape) * size != tensor.nbytes:
        raise ValueError(f"'{name}' of shape {list(tensor.shape)} has {tensor.nbytes} bytes")
    return tensor


def _read_index(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserInputError(f"'{index}' is not a valid safetensors index.", why=str(error), fix=_AGAIN) from error
    outside = [file for file in set(names.values()) if Path(file).name != file]
    if outside:
        raise UserInputError(f"'{index}' names a file outside its folder: {outside[0]}.", fix=_AGAIN)
    return names


def _files_without_index(folder: Path) -> list[Path]:
    """`model.safetensors`, or a full set of numbered shards whose index was not copied, or the only file there is."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    numbered = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    sets = {(match["stem"], match["count"]) for match in numbered}
    if len(sets) == 1:
        stem, count = sets.pop()
        return [folder / f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    if len(files) == 1:
        return files
    raise UserInputError(
        f"'{folder}' contains {len(files)} safetensors files but no {INDEX} that lists those of the model.",
        why=f"Files: {_some([file.name for file in files])}.",
        fix=f"Copy {INDEX} too, or keep only the model's files in the folder.",
    )


def _compare(folder: Path, listed: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    elsewhere = sorted(name for name, file in listed.items() if name in tensors and tensors[name].file.name != file)
    absent = sorted(set(listed) - set(tensors))
    unlisted = sorted(set(tensors) - set(listed))
    for names, problem in (
        (absent, "lists tensors that are in no file"),
        (elsewhere, "lists the wrong file for"),
        (unlisted, "does not list tensors of the files"),
    ):
        if names:
            raise UserInputError(
                f"{INDEX} of '{folder}' does not match the files: it {problem}: {_some(names)}.",
                why="Files and index are from different saves, or the index was edited.",
                fix="Copy or download index and files together.",
            )


def _damaged(file: Path, how: str) -> UserInputError:
    return UserInputError(f"The weights file '{file}' is damaged: {how}.", fix=_AGAIN)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
