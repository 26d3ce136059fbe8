"""Qwen3-Next: three of four layers are gated delta nets; routed experts and a shared one behind a gate."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import (
    DELTA_NET_CARRIES_STATE,
    DELTA_NET_IN_PLAIN_TORCH,
    EXPERTS,
    MLP,
    SELF_ATTENTION,
    mixture_aliases,
)

_LINEAR_ATTENTION = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj")

FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    causal_lm={"qwen3_next": "Qwen3NextForCausalLM"},
    decoder_layer={"qwen3_next": "Qwen3NextDecoderLayer"},
    attention=(*_LINEAR_ATTENTION, *SELF_ATTENTION),
    mlp=MLP,
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    experts=EXPERTS,
    router=("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    aliases=mixture_aliases("mlp.shared_expert", "mlp"),
    layer_types={"qwen3_next": full_every(4, "full_attention_interval", "linear_attention")},
    router_loss=True,
    pitfalls=(DELTA_NET_IN_PLAIN_TORCH,),
    proven=frozenset({"fused_loss", "fused_experts", "selective"}),
    unsupported={"packing": DELTA_NET_CARRIES_STATE},
)
