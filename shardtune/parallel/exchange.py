"""What may ranks send each other? JSON and nothing else: what arrives is data, never code that unpickling would run."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from shardtune.errors import ShardtuneError

_PLAIN = (str, int, float, bool, type(None))


def to_bytes(value: Any) -> bytes:
    """`value` as JSON that gives back exactly `value` (NaN and infinities included, as Python writes and reads them).

    Raises:
        TypeError: something in it would come back as something else: a tuple, a key that is no string, a tensor, bytes,
            a dataclass, a subclass of a plain type (numpy's float64 is one of float).
    """
    _check(value, "it")
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def from_bytes(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ShardtuneError(
            "Another rank has sent something that is not JSON.",
            why=f"{error} in {content[:60]!r}.",
            fix="Use the same version of shardtune on every node.",
        ) from error


def _check(value: Any, where: str) -> None:
    kind = type(value)
    if kind is list:
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"ranks exchange JSON, and {where} has the key {key!r} of type {type(key).__name__}")
            _check(item, f"{where}[{key!r}]")
    elif kind not in _PLAIN:
        raise TypeError(f"ranks exchange JSON, and {where} is of type {kind.__name__}")


def broadcast(value: Any, group: dist.ProcessGroup) -> Any:
    """Rank 0's `value`, on every rank."""
    if dist.get_rank(group) == 0:
        content = _tensor(to_bytes(value))
        if dist.get_world_size(group) == 1:
            return value
        dist.broadcast(torch.tensor([content.numel()]), src=0, group=group)
        dist.broadcast(content, src=0, group=group)
        return value
    length = torch.empty(1, dtype=torch.int64)
    dist.broadcast(length, src=0, group=group)
    content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, src=0, group=group)
    return from_bytes(content.numpy().tobytes())


def gather(value: Any, group: dist.ProcessGroup, *, everywhere: bool) -> list[Any]:
    """Every rank's value by its number: on all ranks, or on rank 0 alone (an empty list elsewhere)."""
    content = _tensor(to_bytes(value))
    if dist.get_world_size(group) == 1:
        return [value]
    lengths = list(torch.empty(dist.get_world_size(group), 1, dtype=torch.int64))
    dist.all_gather(lengths, torch.tensor([content.numel()]), group=group)
    longest = int(max(lengths))
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: content.numel()] = content
    receives = everywhere or dist.get_rank(group) == 0
    received = list(torch.empty(len(lengths), longest, dtype=torch.uint8)) if receives else []
    if everywhere:
        dist.all_gather(received, mine, group=group)
    else:
        dist.gather(mine, received or None, dst=0, group=group)
    return [
        from_bytes(row[: int(length)].numpy().tobytes())
        for row, length in zip(received, lengths if receives else [], strict=True)
    ]


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def tensor_spec(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor without its content, as JSON; a single number keeps its value."""
    return {
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "value": tensor.item() if tensor.dim() == 0 else None,
    }


def tensor_from_spec(given: dict[str, Any]) -> torch.Tensor:
    """The tensor of an tensor_spec, on the meta device; a single number as it was."""
    dtype = dtype_of(given["dtype"])
    if given["value"] is not None:
        return torch.tensor(given["value"], dtype=dtype)
    return torch.empty(given["shape"], dtype=dtype, device="meta")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ShardtuneError(
            f"Another rank has sent a tensor of the unknown dtype '{name}'.",
            fix="Use the same version of torch on every node.",
        )
    return found
