"""How does a linear layer with LoRA multiply? The frozen product and the low-rank one in one operator.

`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ (+ bias)`. The operator keeps x and x Aᵀ alone for the backward pass, adds the low-rank
product within the matrix product, and casts nothing. It is opaque to torch.compile, which would turn the addition in
place into a copy of every output (4 % of a step of a 7B model). The eager twin is `lora_linear_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropped: Tensor | None = None
) -> Tensor:
    """A frozen linear layer and its adapter.

    Args:
        x: (..., in).
        weight: (out, in), frozen.
        bias: (out,), frozen.
        a: (r, in).
        b: (out, r).
        dropped: What the adapter sees in place of x (x after dropout).
    """
    flat = x.reshape(-1, x.shape[-1])
    other = dropped.reshape(-1, x.shape[-1]) if dropped is not None else None
    out, _ = _forward(flat, other, weight, bias, a, b, scaling)
    result: Tensor = out.view(*x.shape[:-1], weight.shape[0])
    return result


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropped: Tensor | None = None
) -> Tensor:
    """The meaning of `lora_linear`, as PEFT computes it."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x if dropped is None else dropped, a), b) * scaling


@torch.library.custom_op("shardtune::lora_linear", mutates_args=())
def _forward(
    x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    low = (x if dropped is None else dropped) @ a.t()
    return F.linear(x, weight, bias).addmm_(low, b.t(), alpha=scaling), low


@_forward.register_fake
def _(
    x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("shardtune::lora_linear_backward", mutates_args=())
def _backward(
    grad: Tensor, seen: Tensor, low: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, apart: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of `dropped` where it is apart from x, of A and of B."""
    grad_low = (grad @ b).mul_(scaling)
    grad_x = grad @ weight
    grad_dropped = grad_low @ a if apart else grad.new_empty(0)
    if not apart:
        grad_x.addmm_(grad_low, a)
    return grad_x, grad_dropped, grad_low.t() @ seen, (grad.t() @ low).mul_(scaling)


@_backward.register_fake
def _(
    grad: Tensor, seen: Tensor, low: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, apart: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dropped = torch.empty_like(seen) if apart else grad.new_empty(0)
    return torch.empty_like(seen), dropped, torch.empty_like(a), torch.empty_like(b)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, dropped, weight, _bias, a, b, scaling = inputs
    ctx.save_for_backward(x if dropped is None else dropped, output[1], weight, a, b)
    ctx.scaling, ctx.apart = scaling, dropped is not None


def _gradients(ctx: Any, grad: Tensor, _low: Tensor) -> tuple[Tensor | None, ...]:
    seen, low, weight, a, b = ctx.saved_tensors
    grad_x, grad_dropped, grad_a, grad_b = _backward(grad.contiguous(), seen, low, weight, a, b, ctx.scaling, ctx.apart)
    return grad_x, grad_dropped if ctx.apart else None, None, None, grad_a, grad_b, None


_forward.register_autograd(_gradients, setup_context=_keep)
