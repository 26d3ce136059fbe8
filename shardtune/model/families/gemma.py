"""Gemma 1: a dense decoder with separate projections."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="gemma",
    model_types=("gemma",),
    causal_lm={"gemma": "GemmaForCausalLM"},
    decoder_layer={"gemma": "GemmaDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    pitfalls=("The output head shares the weight of the embedding.",),
    proven=SOFTMAX_ATTENTION,
)
