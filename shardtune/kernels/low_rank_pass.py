"""How is a product of low rank added to a matrix? Read once and written once, in one Triton kernel.

A matrix product of rank 16 is nothing to multiply and all memory. cuBLAS makes it as any other product, at about half
of the memory's speed. Imported where there is a GPU alone; the twin is `Tensor.addmm_`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_RANK = 128
_ROWS, _COLUMNS, _WARPS = 32, 128, 4


def takes(target: Tensor, rank: int) -> bool:
    """Is this such a product? Rows of the target must lie side by side."""
    return 0 < rank <= LARGEST_RANK and target.stride(-1) == 1 and target.dtype in (torch.bfloat16, torch.float16)


def add_low_rank_(target: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """`target.addmm_(left, right, alpha=alpha)` for (n, m), (n, r) and (r, m) of one dtype; sums are float32."""
    n, m = target.shape
    rank = left.shape[1]
    if n and m:
        grid = (triton.cdiv(m, _COLUMNS), triton.cdiv(n, _ROWS))
        _add[grid](
            target, left, right, n, m, target.stride(0), left.stride(0), left.stride(1), right.stride(0),
            right.stride(1), alpha, RANK=rank, INNER=max(16, triton.next_power_of_2(rank)), ROWS=_ROWS,
            COLUMNS=_COLUMNS, num_warps=_WARPS,
        )  # fmt: skip
    return target


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    target, left, right, n, m, target_row, left_row, left_inner, right_inner, right_column, alpha,
    RANK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    at = target + row.to(tl.int64)[:, None] * target_row + column[None, :]
    inside = (row < n)[:, None] & (column < m)[None, :]
    before = tl.load(at, mask=inside, other=0.0)
    one = tl.load(
        left + row.to(tl.int64)[:, None] * left_row + inner[None, :] * left_inner,
        mask=(row < n)[:, None] & (inner < RANK)[None, :],
        other=0.0,
    )
    other = tl.load(
        right + inner[:, None] * right_inner + column[None, :] * right_column,
        mask=(inner < RANK)[:, None] & (column < m)[None, :],
        other=0.0,
    )
    added = tl.dot(one, other) * alpha
    tl.store(at, (before.to(tl.float32) + added).to(target.dtype.element_ty), mask=inside)
