"""Phi 3, 3.5 and 4: queries, keys and values in one projection, gate and up in another."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family

_QKV, _GATE_UP, _DOWN = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)

FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    causal_lm={"phi3": "Phi3ForCausalLM"},
    decoder_layer={"phi3": "Phi3DecoderLayer"},
    attention=("self_attn.qkv_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    aliases={
        "q_proj": _QKV, "k_proj": _QKV, "v_proj": _QKV, "gate_proj": _GATE_UP, "up_proj": _GATE_UP, "w1": _GATE_UP,
        "w2": _DOWN, "w3": _GATE_UP,
    },
    pitfalls=(
        "Queries, keys and values share one adapter: at the same rank it has fewer parameters than three.",
    ),
    proven=SOFTMAX_ATTENTION,
)  # fmt: skip
