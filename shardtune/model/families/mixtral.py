"""Mixtral: every feed-forward is a mixture of routed experts, without a shared one."""

from __future__ import annotations

from shardtune.model.families.family import Family

_GATE_UP, _DOWN = ("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    causal_lm={"mixtral": "MixtralForCausalLM"},
    decoder_layer={"mixtral": "MixtralDecoderLayer"},
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    router=("mlp.gate.weight",),
    meanings={
        "gate_proj": _GATE_UP, "up_proj": _GATE_UP, "down_proj": _DOWN, "w1": _GATE_UP, "w2": _DOWN, "w3": _GATE_UP,
    },
    pitfalls=(
        "There is no shared expert and no dense layer: without lora.experts only attention trains.",
        "Checkpoints store one tensor per expert under block_sparse_moe; transformers renames and fuses them.",
        "PEFT takes w1, w2, w3 and gate for names of transformers 4 and puts adapters on the routed experts (of "
        "doubled rank) and the router.",
    ),
)  # fmt: skip
