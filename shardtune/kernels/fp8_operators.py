"""How does autograd and torch.compile see a product with float8 codes? As one operator forward and one backward.

torch.compile does not look into them: it can neither keep a dequantised weight from forward to backward, which would
be all that float8 saves, nor spend time on what is inside. Only codes and scales, which are there anyway, are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardtune.kernels.fp8 import CODES, Block
from shardtune.kernels.fp8_products import (
    grouped,
    grouped_back,
    product,
    product_back,
    rounded,
    rounding_width,
)
from shardtune.kernels.operators import operator


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, block: Block, bias: Tensor | None = None, fp8_compute: bool = False
) -> Tensor:
    """`x @ weight.T + bias` with x (..., in) and a frozen weight (out, in) held as codes.

    Args:
        fp8_compute: Round x to float8 and multiply the codes, where `why_not` has no reason against it; otherwise
            the weight exists in x's dtype during the product.
    """
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _Linear.apply(flat, codes, scale, block, None if bias is None else bias.to(x.dtype), fp8_compute)
    return out.view(*x.shape[:-1], codes.shape[0])


def grouped_linear(
    x: Tensor, codes: Tensor, scale: Tensor, block: Block, ends: Tensor, fp8_compute: bool = False
) -> Tensor:
    """Rows of group e of x (n, in) times `weight[e].T`, the frozen weight (E, out, in) held as codes.

    Args:
        ends: (E,) int32, where each group of rows ends. Groups may be empty and of any size.
    """
    result: Tensor = _GroupedLinear.apply(x, codes, scale, block, ends, fp8_compute)
    return result


def round_for(x: Tensor, codes: Tensor, block: Block, fp8_compute: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """x (n, in) as a product with these codes sees it: its own codes and scales; nothing where it sees x itself.

    An operator by itself, outside of the product: layers that read the same x (query, key and value; gate and up) ask
    for the same, which compiled code computes once.
    """
    width = rounding_width(codes.shape, block) if fp8_compute else None
    return (None, None) if width is None else _round(x, width)


def _round_like(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(x.shape[1] // width, x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=CODES), scale.t()


@operator("fp8_round", _round_like)
def _round(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    codes, scale = rounded(x, width)
    return codes, scale.t().contiguous().t()  # column by column, as the one pass on a GPU leaves it


def _linear_like(
    x: Tensor,
    x_codes: Tensor | None,
    x_scale: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    bias: Tensor | None,
) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


@operator("fp8_linear", _linear_like)
def _linear(
    x: Tensor,
    x_codes: Tensor | None,
    x_scale: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    bias: Tensor | None,
) -> Tensor:
    return product(x, x_codes, x_scale, codes, scale, (rows, columns), bias)


def _linear_back_like(grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, fp8_compute: bool) -> Tensor:
    return grad.new_empty(grad.shape[0], codes.shape[1])


@operator("fp8_linear_backward", _linear_back_like)
def _linear_back(grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, fp8_compute: bool) -> Tensor:
    return product_back(grad, codes, scale, (rows, columns), fp8_compute)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, block: Block, bias: Tensor | None, fp8_compute: bool
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.how = *block, fp8_compute
        seen = round_for(x, codes, block, fp8_compute)
        out: Tensor = _linear(x, *seen, codes, scale, *block, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        of_x = _linear_back(grad.contiguous(), codes, scale, *ctx.how) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, grad.sum(0) if ctx.needs_input_grad[4] else None, None


def _grouped_like(
    x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, fp8_compute: bool
) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


@operator("fp8_grouped_linear", _grouped_like)
def _grouped_linear(
    x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, fp8_compute: bool
) -> Tensor:
    return grouped(x, codes, scale, (rows, columns), ends, fp8_compute)


def _grouped_back_like(
    grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, fp8_compute: bool
) -> Tensor:
    return grad.new_empty(grad.shape[0], codes.shape[2])


@operator("fp8_grouped_linear_backward", _grouped_back_like)
def _grouped_back(
    grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, fp8_compute: bool
) -> Tensor:
    return grouped_back(grad, codes, scale, (rows, columns), ends, fp8_compute)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, block: Block, ends: Tensor, fp8_compute: bool
    ) -> Tensor:
        ctx.save_for_backward(codes, scale, ends)
        ctx.how = *block, fp8_compute
        out: Tensor = _grouped_linear(x, codes, scale, *block, ends, fp8_compute)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        codes, scale, ends = ctx.saved_tensors
        rows, columns, fp8_compute = ctx.how
        back = _grouped_back(grad.contiguous(), codes, scale, rows, columns, ends, fp8_compute)
        return back, None, None, None, None, None
