"""GLM-4 and GLM-4-0414: dense decoders, gate and up in one projection."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import SELF_ATTENTION

_GATE_UP, _DOWN = ("mlp.gate_up_proj",), ("mlp.down_proj",)

FAMILY = Family(
    name="glm4",
    model_types=("glm", "glm4"),
    causal_lm={"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"},
    decoder_layer={"glm": "GlmDecoderLayer", "glm4": "Glm4DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=(*_GATE_UP, "mlp.down_proj"),
    aliases={"gate_proj": _GATE_UP, "up_proj": _GATE_UP, "w1": _GATE_UP, "w2": _DOWN, "w3": _GATE_UP},
    proven=SOFTMAX_ATTENTION,
)
