"""How does a linear layer with LoRA multiply? The frozen product and the low-rank one in one operator.

`y = x Wᵀ + scaling · (x Aᵀ) Bᵀ (+ bias)`. The operator keeps x and x Aᵀ alone for the backward pass and casts nothing.
The low-rank product is written first and the frozen one adds itself to it: within a product that large the addition
costs next to nothing, and behind it a pass over memory. It is opaque to torch.compile, which would turn the addition in
place into a copy of every output. The eager twin is `lora_linear_reference`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardtune.kernels.operators import operator


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropped: Tensor | None = None
) -> Tensor:
    """A frozen linear layer and its adapter.

    Args:
        x: (..., in).
        weight: (out, in), frozen.
        bias: (out,), frozen or trained.
        a: (r, in).
        b: (out, r).
        dropped: What the adapter sees in place of x (x after dropout).
    """
    flat = x.reshape(-1, x.shape[-1])
    other = dropped.reshape(-1, x.shape[-1]) if dropped is not None else None
    out: Tensor = _LoraLinear.apply(flat, other, weight, bias, a, b, scaling)
    return out.view(*x.shape[:-1], weight.shape[0])


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, dropped: Tensor | None = None
) -> Tensor:
    """The meaning of `lora_linear`, as PEFT computes it."""
    return F.linear(x, weight, bias) + F.linear(F.linear(x if dropped is None else dropped, a), b) * scaling


def low_gradients(grad: Tensor, seen: Tensor, low: Tensor, b: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of x Aᵀ, of A and of B. Scaled within the products (`beta=0`: what is added to is not read)."""
    grad_low = torch.addmm(low, grad, b, beta=0, alpha=scaling)
    return grad_low, grad_low.t() @ seen, torch.addmm(b, grad.t(), low, beta=0, alpha=scaling)


def add_low_rank_(target: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """`target + alpha * left @ right`, in place: (n, m), (n, r), (r, m).

    For float8 layers, whose frozen product cannot add itself; on a GPU in one kernel that reads and writes once.
    """
    pass_ = _pass() if target.is_cuda else None
    if pass_ is not None and pass_.takes(target, left.shape[1]):
        added: Tensor = pass_.add_low_rank_(target, left, right, alpha)
        return added
    return target.addmm_(left, right, alpha=alpha)


@cache
def _pass() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from shardtune.kernels import low_rank_pass

    return low_rank_pass


def _forward_like(
    x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@operator("lora_linear", _forward_like)
def _forward(
    x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    low = (x if dropped is None else dropped) @ a.t()
    if bias is None:
        out = x.new_empty(x.shape[0], weight.shape[0]).addmm_(low, b.t(), beta=0, alpha=scaling)
    else:
        out = torch.addmm(bias, low, b.t(), alpha=scaling)
    return out.addmm_(x, weight.t()), low


def _backward_like(
    grad: Tensor, seen: Tensor, low: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, apart: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dropped = torch.empty_like(seen) if apart else grad.new_empty(0)
    return torch.empty_like(seen), dropped, torch.empty_like(a), torch.empty_like(b)


@operator("lora_linear_backward", _backward_like)
def _backward(
    grad: Tensor, seen: Tensor, low: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, apart: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of `dropped` where it is apart from x, of A and of B."""
    grad_low, of_a, of_b = low_gradients(grad, seen, low, b, scaling)
    if apart:
        return grad @ weight, grad_low @ a, of_a, of_b
    return (grad_low @ a).addmm_(grad, weight), grad.new_empty(0), of_a, of_b


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        out, low = _forward(x, dropped, weight, bias, a, b, scaling)
        ctx.save_for_backward(x if dropped is None else dropped, low, weight, a, b)
        ctx.scaling, ctx.apart = scaling, dropped is not None
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        seen, low, weight, a, b = ctx.saved_tensors
        of_x, of_dropped, of_a, of_b = _backward(grad.contiguous(), seen, low, weight, a, b, ctx.scaling, ctx.apart)
        of_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return of_x, of_dropped if ctx.apart else None, None, of_bias, of_a, of_b, None
