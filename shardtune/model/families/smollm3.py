"""SmolLM3: a dense decoder, some of whose layers have no position embedding."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import windows_without_positions
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="smollm3",
    model_types=("smollm3",),
    causal_lm={"smollm3": "SmolLM3ForCausalLM"},
    decoder_layer={"smollm3": "SmolLM3DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    layer_types={"smollm3": windows_without_positions},
    pitfalls=("The output head shares the weight of the embedding.",),
    proven=SOFTMAX_ATTENTION,
)
