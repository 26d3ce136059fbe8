"""Granite 3: a dense decoder with muP multipliers on embeddings, residuals, attention and logits."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="granite",
    model_types=("granite",),
    causal_lm={"granite": "GraniteForCausalLM"},
    decoder_layer={"granite": "GraniteDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    pitfalls=("Logits are divided by logits_scaling: the loss is fused with the head only where that is 1.",),
    proven=SOFTMAX_ATTENTION,
)
