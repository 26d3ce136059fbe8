"""How does a linear layer with LoRA multiply when its weight is float8 codes? As `kernels.lora`, in one operator.

`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ (+ bias)`: the frozen product as `fp8_products` makes it, the low-rank one in x's dtype,
added within its last matrix product. The twin is `fp8_operators.linear` plus the low-rank product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.fp8 import Block
from shardtune.kernels.fp8_products import product, product_back


def fp8_lora_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    block: Block,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    dropped: Tensor | None = None,
    multiply_codes: bool = False,
) -> Tensor:
    """A frozen linear layer held in float8 and its adapter.

    Args:
        x: (..., in).
        codes: (out, in), with the scales of their blocks.
        bias: (out,), frozen.
        a: (r, in).
        b: (out, r).
        dropped: What the adapter sees in place of x (x after dropout).
        multiply_codes: Round x and the gradients to float8 for the frozen product, instead of dequantising the weight.
    """
    flat = x.reshape(-1, x.shape[-1])
    other = dropped.reshape(-1, x.shape[-1]) if dropped is not None else None
    out, _ = _forward(flat, other, codes, scale, *block, multiply_codes, bias, a, b, scaling)
    result: Tensor = out.view(*x.shape[:-1], codes.shape[0])
    return result


@torch.library.custom_op("shardtune::fp8_lora_linear", mutates_args=())
def _forward(
    x: Tensor,
    dropped: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    multiply_codes: bool,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    low = (x if dropped is None else dropped) @ a.t()
    out = product(x, codes, scale, (rows, columns), multiply_codes, bias)
    return out.addmm_(low, b.t(), alpha=scaling), low


@_forward.register_fake
def _(
    x: Tensor,
    dropped: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    multiply_codes: bool,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], codes.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("shardtune::fp8_lora_linear_backward", mutates_args=())
def _backward(
    grad: Tensor,
    seen: Tensor,
    low: Tensor,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    multiply_codes: bool,
    a: Tensor,
    b: Tensor,
    scaling: float,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of `dropped` where it is apart from x, of A and of B."""
    grad_low = (grad @ b).mul_(scaling)
    grad_x = product_back(grad, codes, scale, (rows, columns), multiply_codes)
    grad_dropped = grad_low @ a if apart else grad.new_empty(0)
    if not apart:
        grad_x.addmm_(grad_low, a)
    return grad_x, grad_dropped, grad_low.t() @ seen, (grad.t() @ low).mul_(scaling)


@_backward.register_fake
def _(
    grad: Tensor,
    seen: Tensor,
    low: Tensor,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    multiply_codes: bool,
    a: Tensor,
    b: Tensor,
    scaling: float,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dropped = torch.empty_like(seen) if apart else grad.new_empty(0)
    return torch.empty_like(seen), dropped, torch.empty_like(a), torch.empty_like(b)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, dropped, codes, scale, rows, columns, multiply_codes, _bias, a, b, scaling = inputs
    ctx.save_for_backward(x if dropped is None else dropped, output[1], codes, scale, a, b)
    ctx.how, ctx.scaling, ctx.apart = (rows, columns, multiply_codes), scaling, dropped is not None


def _gradients(ctx: Any, grad: Tensor, _low: Tensor) -> tuple[Tensor | None, ...]:
    seen, low, codes, scale, a, b = ctx.saved_tensors
    of_x, of_dropped, of_a, of_b = _backward(
        grad.contiguous(), seen, low, codes, scale, *ctx.how, a, b, ctx.scaling, ctx.apart
    )
    return of_x, of_dropped if ctx.apart else None, None, None, None, None, None, None, of_a, of_b, None


_forward.register_autograd(_gradients, setup_context=_keep)
