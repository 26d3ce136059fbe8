"""Gemma 3, the text model: dense decoders with separate projections and normed queries and keys."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.wrappers import GEMMA3

FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    causal_lm={"gemma3_text": "Gemma3ForCausalLM"},
    decoder_layer={"gemma3_text": "Gemma3DecoderLayer"},
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    meanings={"w1": ("mlp.gate_proj",), "w2": ("mlp.down_proj",), "w3": ("mlp.up_proj",)},
    wrappers=(GEMMA3,),
    pitfalls=(
        "The output head shares the embedding's weight and is not stored by itself.",
        "The released checkpoints from 4B up are vision+text: the text model is inside the wrapper.",
    ),
)
