"""Qwen3: dense decoders with separate projections and normed queries and keys."""

from __future__ import annotations

from shardtune.model.families.family import Family

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    causal_lm={"qwen3": "Qwen3ForCausalLM"},
    decoder_layer={"qwen3": "Qwen3DecoderLayer"},
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    meanings={"w1": ("mlp.gate_proj",), "w2": ("mlp.down_proj",), "w3": ("mlp.up_proj",)},
)
