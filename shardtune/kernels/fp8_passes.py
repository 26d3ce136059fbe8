"""How do float8 codes pass through memory once? Rounding, dequantising and transposing in one Triton pass each.

Imported where there is a GPU alone. `kernels.fp8` and `kernels.fp8_products` hold the twins and say what each means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardtune.kernels.fp8 import CODES, LARGEST_CODE, Block

_TILE = 128  # of a transposition
_ROWS, _COLUMNS = 16, 512  # of a dequantised tile
_SPAN = 16384  # elements of a row that are rounded at once


def transpose_codes(codes: Tensor) -> Tensor:
    """(..., R, C) as (..., C, R). torch's own copy moves single bytes."""
    *leading, rows, columns = codes.shape
    target = torch.empty(*leading, columns, rows, dtype=torch.uint8, device=codes.device)
    if target.numel():
        grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE), codes.numel() // (rows * columns))
        _transpose[grid](codes.contiguous().view(torch.uint8), target, rows, columns, TILE=_TILE)
    return target.view(CODES)


def dequantize_codes(codes: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`fp8.dequantize`: one byte read and one value written for each element."""
    rows, columns = codes.shape[-2:]
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if values.numel():
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS), codes.numel() // (rows * columns))
        _dequantize[grid](
            codes.contiguous(), scale.contiguous(), values, rows, columns, scale.shape[-2], scale.shape[-1],
            min(block[0], rows), min(block[1], columns), ONE_A_ROW=scale.shape[-1] == 1, ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
    return values


def round_rows(x: Tensor, width: int, by: Tensor | None, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """`fp8_products.rounded` on a GPU: codes (n, c), and scales (n, c / width) of which a column is contiguous."""
    n, columns = x.shape
    codes = torch.empty(x.shape, dtype=CODES, device=x.device)
    scale = torch.empty(columns // width, n, dtype=torch.float32, device=x.device)
    if n:
        span = min(_SPAN, triton.next_power_of_2(width))
        _round_rows[(n, columns // width)](
            x.contiguous(), codes, scale, by, group, n, columns, LARGEST=LARGEST_CODE, WIDTH=width, SPAN=span,
            SCALED=by is not None, GROUPED=group is not None, num_warps=max(1, min(8, span // 512)),
        )  # fmt: skip
    return codes, scale.t()


@triton.jit
def _transpose(source, target, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source + matrix + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(target + matrix + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    codes, scale, values, rows, columns, scale_rows, scale_columns, block_rows, block_columns,
    ONE_A_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = matrix * rows * columns + row[:, None] * columns + column[None, :]
    of_row = matrix * scale_rows * scale_columns + (row // block_rows) * scale_columns
    if ONE_A_ROW:
        by = tl.load(scale + of_row, mask=row < rows)[:, None]
    else:
        by = tl.load(scale + of_row[:, None] + (column // block_columns)[None, :], mask=inside)
    value = tl.load(codes + at, mask=inside).to(tl.float32) * by
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _read(x, by, place, WIDTH: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(x + place, mask=place < WIDTH, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(by + place, mask=place < WIDTH, other=0.0)
    return value


@triton.jit
def _code(value, inverse, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(value * inverse, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def _round_rows(  # type: ignore[no-untyped-def]
    x, codes, scale, by, group, n, columns,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    x += row * columns + first
    codes += row * columns + first
    if SCALED:
        by += first
        if GROUPED:
            by += tl.load(group + row).to(tl.int64) * columns
    bits = tl.full([], 0, tl.int32)
    value = _read(x, by, tl.arange(0, SPAN), WIDTH, SCALED)
    for start in tl.static_range(0, WIDTH, SPAN):
        if start > 0:
            value = _read(x, by, start + tl.arange(0, SPAN), WIDTH, SCALED)
        # Without their sign, floats are ordered as their bits are, and a NaN is above all: a maximum of numbers would
        # lose it, and a row that has one must not come out as numbers.
        bits = tl.maximum(bits, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))
    largest = bits.to(tl.float32, bitcast=True)
    zero = bits == 0
    one = tl.where(zero, 1.0, tl.div_rn(largest, LARGEST))
    inverse = tl.where(zero, 1.0, tl.div_rn(LARGEST, largest))
    tl.store(scale + tl.program_id(1).to(tl.int64) * n + row, one)
    # A row that is read at once is still there.
    for start in tl.static_range(0, WIDTH, SPAN):
        place = start + tl.arange(0, SPAN)
        if SPAN < WIDTH:
            value = _read(x, by, place, WIDTH, SCALED)
        tl.store(codes + place, _code(value, inverse, LARGEST), mask=place < WIDTH)
