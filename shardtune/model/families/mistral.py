"""Mistral and Ministral: dense decoders with separate projections."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.wrappers import MISTRAL3

FAMILY = Family(
    name="mistral",
    model_types=("mistral", "ministral", "ministral3"),
    causal_lm={
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    decoder_layer={
        "mistral": "MistralDecoderLayer",
        "ministral": "MinistralDecoderLayer",
        "ministral3": "Ministral3DecoderLayer",
    },
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    meanings={"w1": ("mlp.gate_proj",), "w2": ("mlp.down_proj",), "w3": ("mlp.up_proj",)},
    wrappers=(MISTRAL3,),
    pitfalls=(
        "On the vision+text wrapper the same module names exist in the vision tower: adapters belong on the text "
        "model alone.",
        "ministral3 scales queries by their position, so packed rows need position ids that restart with each row.",
    ),
)
