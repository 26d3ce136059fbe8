"""Qwen3 as a mixture of experts: routed experts only, and dense layers where the config names some."""

from __future__ import annotations

from shardtune.model.families.family import Family

_GATE = ("mlp.gate_proj", "mlp.experts.gate_up_proj")
_UP = ("mlp.up_proj", "mlp.experts.gate_up_proj")
_DOWN = ("mlp.down_proj", "mlp.experts.down_proj")

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    causal_lm={"qwen3_moe": "Qwen3MoeForCausalLM"},
    decoder_layer={"qwen3_moe": "Qwen3MoeDecoderLayer"},
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    router=("mlp.gate.weight",),
    meanings={"gate_proj": _GATE, "up_proj": _UP, "down_proj": _DOWN, "w1": _GATE, "w2": _DOWN, "w3": _UP},
    pitfalls=(
        "There is no shared expert: without lora.experts the feed-forward of a sparse layer does not train.",
        "Checkpoints store one tensor per expert; transformers fuses them when it loads.",
        "PEFT takes gate_proj, up_proj, down_proj and gate for names of transformers 4 and puts adapters on the "
        "routed experts (of doubled rank) and the router. Dense layers are therefore adapted through "
        "target_parameters, which needs lora_dropout: 0.",
    ),
)
