"""OLMo, OLMo 2 and OLMo 3: dense decoders with separate projections; in OLMo 3 most layers see a window."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="olmo",
    model_types=("olmo", "olmo2", "olmo3"),
    causal_lm={"olmo": "OlmoForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"},
    decoder_layer={"olmo": "OlmoDecoderLayer", "olmo2": "Olmo2DecoderLayer", "olmo3": "Olmo3DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    layer_types={"olmo3": full_every(4)},
    proven=SOFTMAX_ATTENTION,
)
