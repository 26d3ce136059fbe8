"""How are bytes transposed at the speed of memory? In tiles, with Triton; imported where there is a GPU alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128


@triton.jit
def _kernel(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source + matrix + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(target + matrix + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


def transpose_bytes(source: Tensor) -> Tensor:
    """(..., R, C) uint8 as (..., C, R)."""
    *leading, rows, columns = source.shape
    target = torch.empty(*leading, columns, rows, dtype=torch.uint8, device=source.device)
    matrices = source.numel() // (rows * columns)
    _kernel[(triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE), matrices)](
        source.contiguous(), target, rows, columns, TILE=_TILE
    )
    return target
