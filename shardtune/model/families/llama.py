"""Llama 2 and 3 and the many models saved as such: dense decoders with separate projections."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    causal_lm={"llama": "LlamaForCausalLM"},
    decoder_layer={"llama": "LlamaDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    proven=SOFTMAX_ATTENTION,
)
