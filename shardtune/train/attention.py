"""Are rows packed, and which attention code keeps documents apart? Settled once model, data and device are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardtune.errors import UserInputError
from shardtune.kernels import varlen, whole_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shardtune.config import ResolvedConfig
    from shardtune.model.families.family import Family

# From here on padding costs less than variable-length attention does (measured: 8 % of a 7B model's step).
NEARLY_FULL = 0.95
# Attention codes that take the documents' bounds instead of a mask.
FLAT_ATTENTION = (varlen.NAME, "flash_attention_2", "flash_attention_3")
_PACKING, _ATTENTION = "train.packing", "model.attn_implementation"


def resolve_packing(
    resolved: ResolvedConfig, model: PreTrainedModel, family: Family, device: torch.device, filled: float
) -> ResolvedConfig:
    """Whether rows are packed, and which attention code keeps them apart. Changes the model's attention where needed.

    Args:
        family: What is known of the architecture: rows are packed only where its layers keep documents apart.
        filled: How much of `data.max_length` a row takes on average.

    Raises:
        UserInputError: packing was asked for, and the model is not known to keep documents apart; or an attention code
            of ours, and it does not fit.
    """
    asked = resolved.config.model.attn_implementation
    on_gpu = varlen.usable(device, torch.bfloat16 if resolved.config.train.bf16 else model.dtype)
    resolved = _resolve_rows(resolved, model, family, nearly_full=on_gpu and filled >= NEARLY_FULL)
    if asked not in ("auto", varlen.NAME, whole_rows.NAME):
        return resolved
    packed = resolved.config.train.packing is True
    name = varlen.NAME if packed else whole_rows.NAME
    obstacle = _why_not_ours(resolved, model, family, on_gpu=on_gpu)
    if asked == "auto" and obstacle is not None:
        own = model.config._attn_implementation  # what transformers takes by itself
        why = obstacle if own == "sdpa" else f"{type(model).__name__} has no sdpa"
        return resolved.with_auto(_ATTENTION, own, why)
    if asked not in ("auto", name) or obstacle is not None:
        raise UserInputError(
            f"{_ATTENTION} is {asked}, which this run cannot use.",
            why=f"{varlen.NAME} is for packed rows and {whole_rows.NAME} for others; both need a GPU and half "
            f"precision. Here {_PACKING} is {str(packed).lower()}.",
            fix=f"Set {_ATTENTION}: auto.",
        )
    (varlen if packed else whole_rows).register()
    model.set_attn_implementation(name)
    if asked == name:
        return resolved
    why = "packed rows on a GPU in half precision" if packed else "rows on a GPU, padded at their end"
    return resolved.with_auto(_ATTENTION, name, why)


def _resolve_rows(
    resolved: ResolvedConfig, model: PreTrainedModel, family: Family, *, nearly_full: bool
) -> ResolvedConfig:
    """`train.packing`, which must be known before the attention code is."""
    asked = resolved.config.model.attn_implementation
    obstacle = family.why_not("packing", model.config)
    if resolved.config.train.packing == "auto":
        if obstacle is not None:
            return resolved.with_auto(_PACKING, False, obstacle)
        if asked == whole_rows.NAME:
            return resolved.with_auto(_PACKING, False, f"{_ATTENTION} is {asked}")
        if nearly_full and asked in ("auto", "sdpa"):
            return resolved.with_auto(_PACKING, False, "rows are nearly full, and attention over whole rows is faster")
        return resolved.with_auto(_PACKING, True, "documents stay apart")
    if resolved.config.train.packing and obstacle is not None:
        raise UserInputError(
            f"{_PACKING} is true, but {type(model).__name__} is not known to keep the documents of a row apart.",
            why=obstacle[0].upper() + obstacle[1:] + ".",
            fix=f"Set {_PACKING}: auto or false: one document per row, padded.",
        )
    return resolved


def _why_not_ours(resolved: ResolvedConfig, model: PreTrainedModel, family: Family, *, on_gpu: bool) -> str | None:
    """Why attention without a mask of transformers cannot be had; None = it can."""
    config = resolved.config
    if config.train.kernels == "eager" and config.model.attn_implementation == "auto":
        return "train.kernels is eager"
    if not on_gpu:
        return "torch's own fused attention"
    if config.train.packing:
        dropped = getattr(model.config, "attention_dropout", 0.0)
        return "attention has dropout" if dropped else family.why_not("varlen", model.config)
    if not whole_rows.usable(model.config, config.data.max_length):
        return "a token does not see all tokens before it in every layer"
    return family.why_not("whole_rows", model.config)
