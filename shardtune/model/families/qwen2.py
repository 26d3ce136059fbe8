"""Qwen2 and Qwen2.5: dense decoders with separate projections; those of attention have biases."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import windows_above
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    causal_lm={"qwen2": "Qwen2ForCausalLM"},
    decoder_layer={"qwen2": "Qwen2DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    layer_types={"qwen2": windows_above},
    proven=SOFTMAX_ATTENTION,
)
