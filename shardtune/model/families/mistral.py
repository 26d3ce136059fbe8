"""Mistral and Ministral: dense decoders with separate projections."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import windows_if_any
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION
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
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    wrappers=(MISTRAL3,),
    layer_types={"ministral": windows_if_any},
    pitfalls=(
        "On the vision+text wrapper the same module names exist in the vision tower: adapters belong on the text "
        "model alone.",
        "ministral3 scales queries by their position, so packed rows need position ids that restart with each row.",
    ),
    proven=SOFTMAX_ATTENTION,
)
