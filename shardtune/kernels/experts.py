"""How do routed experts multiply? Tokens sorted by expert once, then one grouped product for each weight.

LoRA on an expert is two more grouped products of low rank, `scaling * (x Aᵀ) Bᵀ`; the experts' `B A`, as large as all
experts together, never exists. The eager twin, `routed_experts_reference`, is a loop over the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardtune.kernels import fp8_operators
from shardtune.kernels.fp8 import CODES, Block
from shardtune.kernels.grouped import grouped_product, grouped_weight_gradient
from shardtune.kernels.operators import operator

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """One weight of all experts, perhaps with an adapter.

    Args:
        weight: (E, out, in) in any float dtype, or its float8 codes, which come with `scale` and `block`.
        lora_a: (E, r, in).
        lora_b: (E, out, r).
        scaling: What the low-rank product is multiplied with.
        fp8_compute: Round the activations to float8 and multiply the codes themselves (`fp8_products`).
    """

    weight: Tensor
    scale: Tensor | None = None
    block: Block | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 1.0
    fp8_compute: bool = False

    def __post_init__(self) -> None:
        if (self.weight.dtype == CODES) != (self.scale is not None and self.block is not None):
            raise ValueError(f"Float8 codes need scales and a block, and nothing else has them ({self.weight.dtype}).")
        if (self.lora_a is None) != (self.lora_b is None):
            raise ValueError("An adapter has two factors.")


def routed_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    activation: Activation,
) -> Tensor:
    """Each token through its k experts, their outputs added with the router's weights.

    Args:
        x: (tokens, hidden).
        top_k_index: (tokens, k), numbers of experts.
        top_k_weights: (tokens, k); their gradient is what reaches the router.
        activation: What stands between the two products, (n, gate_up's out) to (n, down's in).

    Returns:
        (tokens, hidden) in x's dtype.
    """
    tokens, k = top_k_index.shape
    sorted_experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    numbers = torch.arange(gate_up.weight.shape[0], device=order.device, dtype=sorted_experts.dtype)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)  # (E,): where each group ends

    hidden = activation(_adapted(_ByExpert.apply(x, order, back, k), ends, gate_up))
    out: Tensor = _ByToken.apply(_adapted(hidden, ends, down), order, back)
    weighted = out.view(tokens, k, out.shape[-1]) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(x.dtype)


def routed_experts_reference(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    activation: Activation,
) -> Tensor:
    """The meaning of `routed_experts`, expert by expert: what runs where `train.fused_experts` is off."""
    out = torch.zeros(x.shape[0], down.weight.shape[1], dtype=torch.float32, device=x.device)
    for expert, (up, low) in enumerate(zip(_experts(gate_up), _experts(down), strict=True)):
        token, place = torch.where(top_k_index == expert)
        each = low(activation(up(x[token]))) * top_k_weights[token, place, None]
        out.index_add_(0, token, each.float())
    return out.to(x.dtype)


def _experts(of: ExpertWeight) -> Iterator[Callable[[Tensor], Tensor]]:
    """For each expert, what it does to its tokens."""
    # Unbound at once: the gradients of single experts are then put together once, and not added up.
    names = ("weight", "scale", "lora_a", "lora_b")
    parts = {name: value.unbind() for name in names if (value := getattr(of, name)) is not None}

    def adapted(x: Tensor, one: dict[str, Tensor]) -> Tensor:
        if of.block is not None:
            base = fp8_operators.linear(x, one["weight"], one["scale"], of.block, fp8_compute=of.fp8_compute)
        else:
            base = F.linear(x, one["weight"].to(x.dtype))
        if "lora_a" not in one:
            return base
        return base + F.linear(F.linear(x, one["lora_a"].to(x.dtype)), one["lora_b"].to(x.dtype)) * of.scaling

    for each in zip(*parts.values(), strict=True):
        yield partial(adapted, one=dict(zip(parts, each, strict=True)))


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of group e times `weight[e].T`, differentiable in both.

    Args:
        x: (n, in), rows of one group side by side.
        weight: (E, out, in), of x's dtype.
        ends: (E,) int32, where each group ends. Groups may be empty; the gradient of their weight is zero.
    """
    result: Tensor = _GroupedLinear.apply(x, weight, ends)
    return result


def _adapted(x: Tensor, ends: Tensor, of: ExpertWeight) -> Tensor:
    if of.weight.requires_grad:
        base = grouped_linear(x, of.weight.to(x.dtype), ends)
    elif of.scale is not None and of.block is not None:
        base = fp8_operators.grouped_linear(x, of.weight, of.scale, of.block, ends, of.fp8_compute)
    else:
        base = _FrozenGroupedLinear.apply(x, ends, of.weight)
    if of.lora_a is None or of.lora_b is None:
        return base
    # Both strides of a grouped product must be multiples of 16 bytes: a small rank is filled up with zeros.
    fill = -of.lora_a.shape[1] % (16 // x.element_size())
    a = F.pad(of.lora_a.to(x.dtype), (0, 0, 0, fill))  # (E, r, in)
    b = F.pad(of.lora_b.to(x.dtype), (0, fill))  # (E, out, r)
    return base + grouped_linear(grouped_linear(x, a, ends) * of.scaling, b, ends)


def _grouped_like(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


# Operators, so that torch.compile cannot lay a weight out in a way that torch's grouped product does not take.
@operator("grouped_linear", _grouped_like)
def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_product(x, weight.contiguous(), ends)


def _grouped_back_like(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[2])


@operator("grouped_linear_backward", _grouped_back_like)
def _grouped_back(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_product(grad, weight.contiguous().transpose(-2, -1), ends)


def _grouped_weight_back_like(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


@operator("grouped_linear_weight_backward", _grouped_weight_back_like)
def _grouped_weight_back(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grouped_weight_gradient(grad, x, ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        out: Tensor = _grouped(x, weight, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        of_x = _grouped_back(grad, weight, ends) if ctx.needs_input_grad[0] else None
        of_weight = _grouped_weight_back(grad, x, ends) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


class _FrozenGroupedLinear(torch.autograd.Function):
    """A grouped product that keeps the weight as it is held, and casts it in forward and in backward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ends, weight)
        out: Tensor = _grouped(x, weight.to(x.dtype), ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        ends, weight = ctx.saved_tensors
        return _grouped_back(grad, weight.to(grad.dtype), ends), None, None


class _ByExpert(torch.autograd.Function):
    """(tokens, hidden) to (tokens * k, hidden) sorted by expert; backward adds the k copies in a fixed order.

    Indexing alone would add them with atomics or a sort, and in an order of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x[order // k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back].view(grad.shape[0] // ctx.k, ctx.k, grad.shape[-1]).sum(dim=1), None, None, None


class _ByToken(torch.autograd.Function):
    """Rows sorted by expert back into the order of tokens; a permutation, so backward is the other permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[back]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None
