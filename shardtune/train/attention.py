"""Are rows packed, and which attention code keeps documents apart? Settled once model, data and device are known."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from shardtune.errors import UserInputError
from shardtune.kernels import varlen, whole_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shardtune.config import ResolvedConfig

# From here on padding costs less than variable-length attention does (measured: 8 % of a 7B model's step).
NEARLY_FULL = 0.95
# Attention codes that take the documents' bounds instead of a mask.
FLAT_ATTENTION = (varlen.NAME, "flash_attention_2", "flash_attention_3")
_PACKING, _ATTENTION = "train.packing", "model.attn_implementation"


def settle_packing(
    resolved: ResolvedConfig, model: PreTrainedModel, device: torch.device, filled: float
) -> ResolvedConfig:
    """Whether rows are packed, and which attention code keeps them apart. Changes the model's attention where needed.

    Args:
        filled: How much of `data.max_length` a row takes on average.

    Raises:
        UserInputError: packing was asked for, and the model would let documents read each other; or an attention code
            of ours, and it does not fit.
    """
    apart = masks_are_transformers(model)
    asked = resolved.config.model.attn_implementation
    on_gpu = varlen.usable(device, torch.bfloat16 if resolved.config.train.bf16 else model.dtype)
    if resolved.config.train.packing == "auto":
        if asked == whole_rows.NAME:
            packed, why = False, f"{_ATTENTION} is {asked}"
        elif on_gpu and filled >= NEARLY_FULL and asked in ("auto", "sdpa"):
            packed, why = False, f"rows fill {filled:.1%} of data.max_length, and attention over whole rows is faster"
        else:
            packed = apart
            why = "documents stay apart" if apart else f"{type(model).__name__} would let documents read each other"
        resolved = resolved.with_auto(_PACKING, packed, why)
    elif resolved.config.train.packing and not apart:
        raise UserInputError(
            f"{_PACKING} is true, but {type(model).__name__} would let the documents of a row read each other.",
            why="It does not build its attention mask from positions.",
            fix=f"Set {_PACKING}: auto or false.",
        )
    if asked not in ("auto", varlen.NAME, whole_rows.NAME):
        return resolved
    packed = resolved.config.train.packing is True
    name = varlen.NAME if packed else whole_rows.NAME
    eager = resolved.config.train.kernels == "eager" and asked == "auto"
    fits = (
        on_gpu
        and not eager
        and (packed or (apart and whole_rows.usable(model.config, resolved.config.data.max_length)))
    )
    if asked == "auto" and not fits:
        why = "train.kernels is eager" if eager else "torch's own fused attention"
        return resolved.with_auto(_ATTENTION, "sdpa", why)
    if asked not in ("auto", name) or not fits:
        raise UserInputError(
            f"{_ATTENTION} is {asked}, which this run cannot use.",
            why=f"{varlen.NAME} is for packed rows and {whole_rows.NAME} for others, of models whose tokens see all "
            f"before them; both need a GPU and half precision. Here {_PACKING} is {str(packed).lower()}.",
            fix=f"Set {_ATTENTION}: auto.",
        )
    (varlen if packed else whole_rows).register()
    model.set_attn_implementation(name)
    if asked == name:
        return resolved
    why = "packed rows on a GPU in half precision" if packed else "rows on a GPU, padded at their end"
    return resolved.with_auto(_ATTENTION, name, why)


def masks_are_transformers(model: PreTrainedModel) -> bool:
    """Whether attention is causal, and documents stay apart, by masks that transformers makes from positions."""
    # A model with masks of its own may do anything.
    module = sys.modules[type(model).__module__]
    return any(hasattr(module, name) for name in ("create_causal_mask", "create_sliding_window_causal_mask"))
