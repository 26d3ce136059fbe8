"""Gemma 4, the text model: windows in most layers, keys and values that layers share, inputs of their own per layer."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import MLP, SELF_ATTENTION
from shardtune.model.families.wrappers import GEMMA4

_GATE, _UP = ("mlp.gate_proj", "experts.gate_up_proj"), ("mlp.up_proj", "experts.gate_up_proj")
_DOWN = ("mlp.down_proj", "experts.down_proj")

FAMILY = Family(
    name="gemma4",
    model_types=("gemma4_text",),
    causal_lm={"gemma4_text": "Gemma4ForCausalLM"},
    decoder_layer={"gemma4_text": "Gemma4TextDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    experts=("experts.gate_up_proj", "experts.down_proj"),
    router=("router.proj.weight",),
    other=("per_layer_input_gate", "per_layer_projection"),
    wrappers=(GEMMA4,),
    aliases={"gate_proj": _GATE, "up_proj": _UP, "down_proj": _DOWN, "w1": _GATE, "w2": _DOWN, "w3": _UP},
    layer_types={"gemma4_text": full_every(6, last=True)},
    outside=("model.per_layer_model_projection",),
    buffers=("layer_scalar",),
    pitfalls=(
        "The output head shares the weight of the embedding.",
        "Released as a wrapper with vision and audio; the text model is inside.",
        "Layers that share keys and values have no k_proj and v_proj of their own.",
    ),
    proven=SOFTMAX_ATTENTION - {"varlen"},
    unsupported={
        "varlen": "layers with full attention have a head dimension of 512, and flash attention supports up to 256"
    },
)
