"""Gemma 2: a dense decoder whose attention scores and logits are capped; every other layer sees a window."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

_CAPPED = "attention scores are capped (softcap), which only eager attention computes"

FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    causal_lm={"gemma2": "Gemma2ForCausalLM"},
    decoder_layer={"gemma2": "Gemma2DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    layer_types={"gemma2": full_every(2)},
    own_attention="eager",
    pitfalls=(
        "The output head shares the weight of the embedding.",
        "Attention is eager: scores are capped, which sdpa does not compute.",
        "Logits are capped (final_logit_softcapping): the loss is not fused with the head.",
    ),
    proven=SOFTMAX_ATTENTION - {"varlen", "whole_rows"},
    unsupported={"varlen": _CAPPED, "whole_rows": _CAPPED},
)
