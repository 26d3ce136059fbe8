"""Qwen3: dense decoders with separate projections and normed queries and keys."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import windows_above
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    causal_lm={"qwen3": "Qwen3ForCausalLM"},
    decoder_layer={"qwen3": "Qwen3DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    layer_types={"qwen3": windows_above},
    proven=SOFTMAX_ATTENTION,
)
