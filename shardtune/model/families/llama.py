"""Llama 2 and 3 and the many models saved as such: dense decoders with separate projections."""

from __future__ import annotations

from shardtune.model.families.family import Family

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    causal_lm={"llama": "LlamaForCausalLM"},
    decoder_layer={"llama": "LlamaDecoderLayer"},
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    meanings={"w1": ("mlp.gate_proj",), "w2": ("mlp.down_proj",), "w3": ("mlp.up_proj",)},
)
