"""How does torch learn of our operators, and which operators are too expensive to be computed twice?

torch.compile does not look into an operator, and recomputation knows it by its name. `torch.library.custom_op` gives
the same, with several Python frames and a check of all results around every call; with hundreds of adapters in a step
the device waits for that. Its gradient is defined by a `torch.autograd.Function` around it.

Selective activation checkpointing keeps what matrix products, attention and sorting return (`is_kept`) and recomputes
the rest of a layer (norms, rotary embeddings, activation functions, sums, dropout, low-rank products).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel, infer_schema, register_fake

_OURS = Library("shardtune", "FRAGMENT")
# By name, because not every torch has all of them; with the place of the left factor among their arguments, the right
# one behind it, both as in `(…, inner) @ (…, inner, out)`.
_PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::_grouped_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1,
    "aten::_addmm_activation": 1, "aten::_scaled_mm": 0, "aten::_scaled_mm_v2": 0, "aten::_scaled_grouped_mm": 0,
    "aten::_scaled_grouped_mm_v2": 0, "aten::_int_mm": 0,
}  # fmt: skip
_OTHER_PRODUCTS = frozenset({"aten::linear", "aten::matmul", "aten::convolution"})
# Tokens by their experts: a few numbers for a token, and slow to make. Which experts those are (`topk`) is made again,
# the same from the router's kept product: several models divide what it returns in place, and a kept value must stay.
_ROUTING = frozenset({"aten::sort"})
# Ours. A new operator goes into one of the two.
_OWN = ("lora_linear", "fp8_lora_linear", "fp8_linear", "fp8_grouped_linear", "grouped_linear")
_GROUPED = "shardtune::grouped_linear"  # kept unless it is of low rank
OWN_KEPT = frozenset(f"shardtune::{name}" for name in _OWN)
_BACKWARD = (*_OWN, "grouped_linear_weight")  # in no forward
OWN_RECOMPUTED = frozenset({"shardtune::fp8_round", *(f"shardtune::{name}_backward" for name in _BACKWARD)})


def operator(name: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of tensors `shardtune::name`; it changes none of them, and returns new ones.

    Args:
        like: Takes the same and returns what has the results' shapes, without values.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = infer_schema(function, mutates_args=())
        _OURS.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        _OURS.impl(name, function, "CompositeExplicitAutograd")
        _OURS.impl(name, fallthrough_kernel, "Autograd")
        register_fake(f"shardtune::{name}", like, lib=_OURS)
        return getattr(torch.ops.shardtune, name).default

    return register


def is_kept(operator: Callable[..., Any], args: Sequence[Any] = ()) -> bool:
    """Is what this operator returns kept for the backward pass?

    Args:
        operator: A `torch._ops.OpOverload`, or a higher-order operator such as flex attention.
        args: What it is called with.
    """
    name = str(operator.name()).partition(".")[0]  # type: ignore[attr-defined]  # without its overload
    if name in _PRODUCTS:
        left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        return not is_low_rank(left.shape[-1], right.shape[-1])
    if name == _GROUPED:
        return not is_low_rank(args[0].shape[-1], args[1].shape[-2])
    # torch's attention goes by many names, and flash attention comes in packages that register their own.
    return name in _OTHER_PRODUCTS | _ROUTING | OWN_KEPT or "attention" in name or "attn" in name


def is_low_rank(inner: int, out: int) -> bool:
    """Is a product so flat that making it costs about what writing it down costs?

    An adapter's `(x Aᵀ) Bᵀ` is as wide as the layer, which is a lot to keep, and its inner dimension is the rank, which
    is next to nothing to multiply. The same goes for the scores of plain attention over long rows.
    """
    # A size that the compiler leaves open is not asked: the answer would bind the compiled code to it.
    return isinstance(inner, int) and isinstance(out, int) and 8 * inner <= out
