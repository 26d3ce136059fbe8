"""How does torch learn of an operator of ours? With nothing between its caller and the function.

torch.compile does not look into an operator, and recomputation knows it by its name. `torch.library.custom_op` gives
the same, with several Python frames and a check of all results around every call; with hundreds of adapters in a step
the device waits for that. What an operator's gradient is, a `torch.autograd.Function` around it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel, infer_schema, register_fake

_OURS = Library("shardtune", "FRAGMENT")


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
