"""What is done to the model before it is sharded? Applies what `resolve` chose, on the meta device, in this order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardtune.adapters.fused import use_fused_lora
from shardtune.adapters.lora import add_lora
from shardtune.kernels import fp8_products, varlen, whole_rows
from shardtune.model.experts import use_expert_loops, use_grouped_experts
from shardtune.model.meta_model import fp8_blocks
from shardtune.model.new_tokens import resize_embeddings
from shardtune.model.quantized import enable_fp8_compute, use_fp8_storage
from shardtune.plan.resolve import Notice
from shardtune.train.losses import build_loss

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.adapters.coverage import Coverage
    from shardtune.config.schema import TrainSection
    from shardtune.model.meta_model import MetaModel
    from shardtune.model.new_tokens import NewTokens
    from shardtune.plan.resolve import ResolvedRun
    from shardtune.train.losses import Loss

_ATTENTION = {varlen.NAME: varlen, whole_rows.NAME: whole_rows}


@dataclass(frozen=True)
class Fused:
    """How many layers compute in fused code, of how many that have such a thing: (0, n) where it is switched off."""

    lora: tuple[int, int]
    experts: tuple[int, int]


@dataclass(frozen=True)
class BuiltModel:
    """The model as it trains, without a byte of its weights.

    Attributes:
        coverage: What trains, and how much of the model it acts on.
        new_tokens: Tokens whose rows train, if any.
        notices: What to tell the user about it.
    """

    model: PeftModel
    coverage: Coverage
    new_tokens: NewTokens | None
    fused: Fused
    loss: Loss
    notices: tuple[Notice, ...]


def build_model(run: ResolvedRun, meta_model: MetaModel, named: NewTokens, device: torch.device) -> BuiltModel:
    """FP8 before adapters (PEFT looks at the layers it adapts), rows of new tokens too; then the code that computes.

    Args:
        named: The tokens of `model.new_tokens`.
        device: Where it will compute.
    """
    config, base = run.config, meta_model.model
    if config.model.base_precision == "fp8":
        use_fp8_storage(base, fp8_blocks(meta_model))
    new_tokens = resize_embeddings(base, named) if named.ids else None
    notices = [Notice("new_tokens", text) for text in (new_tokens.notices() if new_tokens is not None else ())]
    model, coverage, about_targets = add_lora(base, config.lora, meta_model.family, named.ids)
    notices += [Notice("lora", text) for text in about_targets]
    if config.train.fp8_compute:
        notices.append(Notice("fp8_compute", _fp8_compute_text(*enable_fp8_compute(model), device)))
    fused = fuse(model, config.train)
    loss = build_loss(config.train, base, meta_model.family)
    if config.model.attn_implementation in _ATTENTION:  # any other was asked for when the model was built
        _ATTENTION[config.model.attn_implementation].register()
        base.set_attn_implementation(config.model.attn_implementation)
    return BuiltModel(model, coverage, new_tokens, fused, loss, tuple(notices))


def fuse(model: PeftModel, train: TrainSection) -> Fused:
    """Switch the layers of an adapted model over to the code that was chosen."""
    return Fused(
        lora=use_fused_lora(model) if train.fused_lora else (0, 0),
        experts=use_grouped_experts(model)
        if train.fused_experts
        else (0, use_expert_loops(model, compiled=bool(train.compile))),
    )


def _fp8_compute_text(multiplied: int, left: Counter[str], device: torch.device) -> str:
    parts = [f"train.fp8_compute: {multiplied} weights are multiplied as float8 codes, activations rounded to float8"]
    if lacking := fp8_products.missing_units(device):
        parts.append(f"{lacking}: rounded the same way, they are multiplied by the eager twin, without a gain in speed")
    for why, count in left.most_common():
        parts.append(f"{count} are dequantised for each product, because they have {why}")
    return "; ".join(parts) + "."
