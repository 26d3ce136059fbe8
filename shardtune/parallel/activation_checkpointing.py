"""What is kept between forward and backward? With selective recomputation, what was expensive in a layer.

The layer's own forward runs within torch's checkpoint, under a policy that knows operators (`kernels/operators.py`). It
lies inside of what sharding hangs around a layer, so that nothing is gathered for the recomputation, and inside of what
is compiled, so that the compiler sees it and splits the layer accordingly.
"""

from __future__ import annotations

import logging
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardtune.kernels.operators import is_kept, is_low_rank

_CACHES = ("past_key_values", "layer_past")


def apply_selective_checkpointing(layers: list[nn.Module]) -> None:
    """Let each layer keep its products and attention, and compute the rest again in the backward pass.

    To be called before the layers are compiled and sharded. Where no gradient is wanted nothing changes.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_about_something_else)
    for layer in layers:
        # A method, not a closure: compiled code is shared by layers that have the same code and differ in `self`.
        layer.forward = MethodType(_forward, layer)
        # Whoever counts work asks for it: of the products, only these are made twice.
        layer.recomputes_product = is_low_rank  # type: ignore[assignment]


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = type(self).forward
    if not (self.training and torch.is_grad_enabled()):
        return own(self, *args, **kwargs)
    for name in _CACHES:  # would be written a second time in the backward pass, and is of no use in training
        if name in kwargs:
            kwargs[name] = None
    return checkpoint(partial(own, self), *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: object, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_about_something_else(record: logging.LogRecord) -> bool:
    # torch warns of operators that write in place whenever a policy meets its compiler. Right results with them are
    # what the tests assert; uncompiled, torch itself refuses to go on where a kept value was overwritten.
    return "context_fn is passed" not in record.getMessage()
