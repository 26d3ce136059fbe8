"""GLM-4.5 and GLM-4.6: routed experts and a shared one; the first layers are dense."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import EXPERTS, MLP, SELF_ATTENTION, mixture_aliases

FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    causal_lm={"glm4_moe": "Glm4MoeForCausalLM"},
    decoder_layer={"glm4_moe": "Glm4MoeDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    experts=EXPERTS,
    router=("mlp.gate.weight",),
    aliases=mixture_aliases("mlp.shared_experts", "mlp"),
    buffers=("mlp.gate.e_score_correction_bias",),
    proven=SOFTMAX_ATTENTION,
)
