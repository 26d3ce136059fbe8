"""How is a checkpoint written that does not fit into memory? Headers first, then each tensor straight into its file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtune.errors import ShardtuneError
from shardtune.export.merged_tensors import MergedTensor
from shardtune.model.safetensors_headers import DTYPE_CODES, INDEX, read_headers

_SINGLE = "model.safetensors"
_CHUNK = 16 << 20
Progress = Callable[[int], None]


def write_shards(
    tensors: Sequence[MergedTensor], folder: Path, max_shard_bytes: int, progress: Progress
) -> dict[str, str]:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` (but for a larger tensor) and their index.

    Returns:
        For each tensor the checksum of the bytes that were handed to the system.
    """
    groups = _grouped(tensors, max_shard_bytes)
    checksums: dict[str, str] = {}
    files: dict[str, str] = {}
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done)

    for number, group in enumerate(groups, start=1):
        name = _SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files |= dict.fromkeys((tensor.name for tensor in group), name)
        checksums |= _write(group, folder / name, count)
    if len(groups) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return checksums


def check_shards(folder: Path, tensors: Sequence[MergedTensor], checksums: dict[str, str], progress: Progress) -> None:
    """Read every tensor back from the files, and compare it with what was computed.

    Raises:
        ShardtuneError: one differs.
    """
    written = read_headers(folder)
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    if {name: (one.dtype, one.shape) for name, one in written.items()} != expected:
        raise ShardtuneError(
            "The written files do not contain the tensors that were computed.", fix="Export again; check the disk."
        )
    done = 0
    for name, stored in written.items():
        digest = hashlib.sha256()
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            rest = stored.nbytes
            while rest:
                piece = file.read(min(_CHUNK, rest))
                if not piece:
                    break
                digest.update(piece)
                rest -= len(piece)
                done += len(piece)
                progress(done)
        if digest.hexdigest() != checksums[name]:
            raise ShardtuneError(
                f"'{stored.file.name}': {name} is not what was written.",
                why="Its bytes were read back, and their checksum differs.",
                fix="Check the disk, and export again.",
            )


def _grouped(tensors: Sequence[MergedTensor], most: int) -> list[list[MergedTensor]]:
    groups: list[list[MergedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def _write(tensors: Sequence[MergedTensor], path: Path, progress: Progress) -> dict[str, str]:
    # As safetensors itself orders them: no tensor begins in the middle of an element.
    ordered = sorted(tensors, key=lambda tensor: -tensor.torch_dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPE_CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    checksums = {}
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(handle, struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            digest, written = hashlib.sha256(), 0
            for chunk in tensor.chunks():
                content = _bytes(chunk)
                _write_all(handle, content)
                digest.update(content)
                written += len(content)
                progress(len(content))
            if written != tensor.nbytes:
                raise ShardtuneError(
                    f"{tensor.name} has {written} bytes instead of {tensor.nbytes}.", fix="Please report this."
                )
            checksums[tensor.name] = digest.hexdigest()
        os.fsync(handle)
        # It is read back from the disk then, and does not push others' files out of memory.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return checksums


def _bytes(chunk: Tensor) -> memoryview:
    return memoryview(chunk.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(handle: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]
