"""How does a linear layer with LoRA multiply when its weight is float8 codes? As `kernels.lora`, in one operator.

`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ (+ bias)`: the frozen product as `fp8_products` makes it, the low-rank one in x's dtype,
added to it in one pass. The twin is `fp8_operators.linear` plus the low-rank product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardtune.kernels.fp8 import Block
from shardtune.kernels.fp8_operators import round_for
from shardtune.kernels.fp8_products import product, product_back
from shardtune.kernels.lora import add_low_rank_, low_gradients
from shardtune.kernels.operators import operator


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
    fp8_compute: bool = False,
) -> Tensor:
    """A frozen linear layer held in float8 and its adapter.

    Args:
        x: (..., in).
        codes: (out, in), with the scales of their blocks.
        bias: (out,), frozen or trained.
        a: (r, in).
        b: (out, r).
        dropped: What the adapter sees in place of x (x after dropout).
        fp8_compute: Round x and the gradients to float8 for the frozen product, instead of dequantising the weight.
    """
    flat = x.reshape(-1, x.shape[-1])
    other = dropped.reshape(-1, x.shape[-1]) if dropped is not None else None
    out: Tensor = _Fp8LoraLinear.apply(flat, other, codes, scale, block, fp8_compute, bias, a, b, scaling)
    return out.view(*x.shape[:-1], codes.shape[0])


def _forward_like(
    x: Tensor,
    x_codes: Tensor | None,
    x_scale: Tensor | None,
    dropped: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], codes.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@operator("fp8_lora_linear", _forward_like)
def _forward(
    x: Tensor,
    x_codes: Tensor | None,
    x_scale: Tensor | None,
    dropped: Tensor | None,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    low = (x if dropped is None else dropped) @ a.t()
    out = product(x, x_codes, x_scale, codes, scale, (rows, columns), bias)
    return add_low_rank_(out, low, b.t(), scaling), low


def _backward_like(
    grad: Tensor,
    seen: Tensor,
    low: Tensor,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    fp8_compute: bool,
    a: Tensor,
    b: Tensor,
    scaling: float,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dropped = torch.empty_like(seen) if apart else grad.new_empty(0)
    return torch.empty_like(seen), dropped, torch.empty_like(a), torch.empty_like(b)


@operator("fp8_lora_linear_backward", _backward_like)
def _backward(
    grad: Tensor,
    seen: Tensor,
    low: Tensor,
    codes: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    fp8_compute: bool,
    a: Tensor,
    b: Tensor,
    scaling: float,
    apart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of `dropped` where it is apart from x, of A and of B."""
    grad_low, of_a, of_b = low_gradients(grad, seen, low, b, scaling)
    of_x = product_back(grad, codes, scale, (rows, columns), fp8_compute)
    if apart:
        return of_x, grad_low @ a, of_a, of_b
    return add_low_rank_(of_x, grad_low, a), grad.new_empty(0), of_a, of_b


class _Fp8LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        block: Block,
        fp8_compute: bool,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        seen = round_for(x, codes, block, fp8_compute)
        out, low = _forward(x, *seen, dropped, codes, scale, *block, bias, a, b, scaling)
        ctx.save_for_backward(x if dropped is None else dropped, low, codes, scale, a, b)
        ctx.how, ctx.scaling, ctx.apart = (*block, fp8_compute), scaling, dropped is not None
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        seen, low, codes, scale, a, b = ctx.saved_tensors
        of_x, of_dropped, of_a, of_b = _backward(
            grad.contiguous(), seen, low, codes, scale, *ctx.how, a, b, ctx.scaling, ctx.apart
        )
        of_bias = grad.sum(0) if ctx.needs_input_grad[6] else None
        return of_x, of_dropped if ctx.apart else None, None, None, None, None, of_bias, of_a, of_b, None
