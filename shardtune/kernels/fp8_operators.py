"""How does autograd and torch.compile see a product with float8 codes? As one operator forward and one backward.

torch.compile does not look into them: it can neither keep a dequantised weight from forward to backward, which would
be all that float8 saves, nor spend time on what is inside. Only codes and scales, which are there anyway, are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.fp8 import Block
from shardtune.kernels.fp8_products import grouped, grouped_back, product, product_back


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, block: Block, bias: Tensor | None = None, multiply_codes: bool = False
) -> Tensor:
    """`x @ weight.T + bias` with x (..., in) and a frozen weight (out, in) held as codes.

    Args:
        multiply_codes: Round x to float8 and multiply the codes, where `why_not` has no reason against it; otherwise
            the weight exists in x's dtype during the product.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = _linear(flat, codes, scale, *block, None if bias is None else bias.to(x.dtype), multiply_codes)
    result: Tensor = out.view(*x.shape[:-1], codes.shape[0])
    return result


def grouped_linear(
    x: Tensor, codes: Tensor, scale: Tensor, block: Block, ends: Tensor, multiply_codes: bool = False
) -> Tensor:
    """Rows of group e of x (n, in) times `weight[e].T`, the frozen weight (E, out, in) held as codes.

    Args:
        ends: (E,) int32, where each group of rows ends. Groups may be empty and of any size.
    """
    result: Tensor = _grouped_linear(x, codes, scale, *block, ends, multiply_codes)
    return result


@torch.library.custom_op("shardtune::fp8_linear", mutates_args=())
def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, bias: Tensor | None, multiply_codes: bool
) -> Tensor:
    return product(x, codes, scale, (rows, columns), multiply_codes, bias)


@_linear.register_fake
def _(
    x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, bias: Tensor | None, multiply_codes: bool
) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


@torch.library.custom_op("shardtune::fp8_linear_backward", mutates_args=())
def _linear_back(grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, multiply_codes: bool) -> Tensor:
    return product_back(grad, codes, scale, (rows, columns), multiply_codes)


@_linear_back.register_fake
def _(grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, multiply_codes: bool) -> Tensor:
    return grad.new_empty(grad.shape[0], codes.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale, rows, columns, _bias, multiply_codes = inputs
    ctx.save_for_backward(codes, scale)
    ctx.how = rows, columns, multiply_codes


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, scale = ctx.saved_tensors
    of_x = _linear_back(grad.contiguous(), codes, scale, *ctx.how) if ctx.needs_input_grad[0] else None
    return of_x, None, None, None, None, grad.sum(0) if ctx.needs_input_grad[5] else None, None


_linear.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("shardtune::fp8_grouped_linear", mutates_args=())
def _grouped_linear(
    x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, multiply_codes: bool
) -> Tensor:
    return grouped(x, codes, scale, (rows, columns), ends, multiply_codes)


@_grouped_linear.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, multiply_codes: bool) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


@torch.library.custom_op("shardtune::fp8_grouped_linear_backward", mutates_args=())
def _grouped_back(
    grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, multiply_codes: bool
) -> Tensor:
    return grouped_back(grad, codes, scale, (rows, columns), ends, multiply_codes)


@_grouped_back.register_fake
def _(
    grad: Tensor, codes: Tensor, scale: Tensor, rows: int, columns: int, ends: Tensor, multiply_codes: bool
) -> Tensor:
    return grad.new_empty(grad.shape[0], codes.shape[2])


def _keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scale, rows, columns, ends, multiply_codes = inputs
    ctx.save_for_backward(codes, scale, ends)
    ctx.how = rows, columns, multiply_codes


def _grouped_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    codes, scale, ends = ctx.saved_tensors
    rows, columns, multiply_codes = ctx.how
    if not ctx.needs_input_grad[0]:
        return None, None, None, None, None, None, None
    back = _grouped_back(grad.contiguous(), codes, scale, rows, columns, ends, multiply_codes)
    return back, None, None, None, None, None, None


_grouped_linear.register_autograd(_grouped_gradients, setup_context=_keep_grouped)
