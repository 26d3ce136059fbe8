"""Qwen3.5, the text model: three of four layers are gated delta nets."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import (
    DELTA_NET_CARRIES_STATE,
    DELTA_NET_IN_PLAIN_TORCH,
    MLP,
    MLP_ALIASES,
    QWEN3_5_DELTA_NET,
    SELF_ATTENTION,
)
from shardtune.model.families.wrappers import QWEN3_5

FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text",),
    causal_lm={"qwen3_5_text": "Qwen3_5ForCausalLM"},
    decoder_layer={"qwen3_5_text": "Qwen3_5DecoderLayer"},
    attention=(*QWEN3_5_DELTA_NET, *SELF_ATTENTION),
    mlp=MLP,
    wrappers=(QWEN3_5,),
    aliases=MLP_ALIASES,
    layer_types={"qwen3_5_text": full_every(4, "full_attention_interval", "linear_attention")},
    pitfalls=(
        "Released as a vision+text wrapper; the text model is inside.",
        DELTA_NET_IN_PLAIN_TORCH,
    ),
    proven=frozenset({"fused_loss", "selective"}),
    unsupported={"packing": DELTA_NET_CARRIES_STATE},
)
