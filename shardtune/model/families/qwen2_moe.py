"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a shared one behind a gate of its own."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import windows_below
from shardtune.model.families.names import EXPERTS, MLP, SELF_ATTENTION, mixture_aliases

FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    causal_lm={"qwen2_moe": "Qwen2MoeForCausalLM"},
    decoder_layer={"qwen2_moe": "Qwen2MoeDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    experts=EXPERTS,
    router=("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    aliases=mixture_aliases("mlp.shared_expert", "mlp"),
    layer_types={"qwen2_moe": windows_below},
    router_loss=True,
    pitfalls=("Checkpoints store one tensor per expert; transformers fuses them when it loads.",),
    proven=SOFTMAX_ATTENTION,
)
