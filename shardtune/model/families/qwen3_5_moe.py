"""Qwen3.5 as a mixture of experts, the text model: three of four layers are gated delta nets."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import (
    DELTA_NET_CARRIES_STATE,
    DELTA_NET_IN_PLAIN_TORCH,
    EXPERTS,
    QWEN3_5_DELTA_NET,
    SELF_ATTENTION,
    mixture_aliases,
)
from shardtune.model.families.wrappers import QWEN3_5_MOE

FAMILY = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text",),
    causal_lm={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    decoder_layer={"qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer"},
    attention=(*QWEN3_5_DELTA_NET, *SELF_ATTENTION),
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    experts=EXPERTS,
    router=("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    wrappers=(QWEN3_5_MOE,),
    aliases=mixture_aliases("mlp.shared_expert"),
    layer_types={"qwen3_5_moe_text": full_every(4, "full_attention_interval", "linear_attention")},
    router_loss=True,
    pitfalls=(
        "Released as a vision+text wrapper; the text model is inside.",
        DELTA_NET_IN_PLAIN_TORCH,
    ),
    proven=frozenset({"fused_loss", "fused_experts", "selective"}),
    unsupported={"packing": DELTA_NET_CARRIES_STATE},
)
