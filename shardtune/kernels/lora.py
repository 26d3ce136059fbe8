"""How does a linear layer with LoRA multiply? The frozen product and the low-rank one in one function.

`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ (+ bias)`. Written as one autograd function it keeps x and x Aᵀ alone for the backward
pass, adds the low-rank product within the matrix product, and casts nothing. The eager twin is `lora_linear_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """A frozen linear layer and its adapter.

    Args:
        x: (..., in).
        weight: (out, in), frozen.
        bias: (out,), frozen.
        a: (r, in).
        b: (out, r).
    """
    result: Tensor = _LoraLinear.apply(x, weight, bias, a, b, scaling)
    return result


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> Tensor:
    """The meaning of `lora_linear`, as PEFT computes it."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x, a), b) * scaling


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low = flat @ a.t()
        out = F.linear(flat, weight, bias).addmm_(low, b.t(), alpha=scaling)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scaling, ctx.shape = scaling, x.shape
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, Tensor | None, None]:
        x, low, weight, a, b = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_low = (grad @ b).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, a).view(ctx.shape)
        return grad_x, None, None, grad_low.t() @ x, (grad.t() @ low).mul_(ctx.scaling), None
