"""LFM2: short convolutions, and softmax attention in every few layers."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import listed_attention

FAMILY = Family(
    name="lfm2",
    model_types=("lfm2",),
    causal_lm={"lfm2": "Lfm2ForCausalLM"},
    decoder_layer={"lfm2": "Lfm2DecoderLayer"},
    attention=(
        "conv.in_proj",
        "conv.out_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
    ),
    mlp=("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    aliases={
        "o_proj": ("self_attn.out_proj",),
        "gate_proj": ("feed_forward.w1",),
        "up_proj": ("feed_forward.w3",),
        "down_proj": ("feed_forward.w2",),
    },
    layer_types={"lfm2": listed_attention},
    pitfalls=("The output head shares the weight of the embedding.",),
    proven=frozenset({"fused_loss", "selective"}),
    unsupported={"packing": "convolutions read preceding tokens, also those of another document"},
)
