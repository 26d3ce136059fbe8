"""DeepSeek V3 and R1: attention with compressed queries and keys/values (MLA), routed experts and shared ones."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import EXPERTS, MLP, mixture_aliases

_QUERY = ("self_attn.q_a_proj", "self_attn.q_b_proj")
_KEY_VALUE = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")

FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    causal_lm={"deepseek_v3": "DeepseekV3ForCausalLM"},
    decoder_layer={"deepseek_v3": "DeepseekV3DecoderLayer"},
    attention=(*_QUERY, "self_attn.q_proj", *_KEY_VALUE, "self_attn.o_proj"),
    mlp=MLP,
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    experts=EXPERTS,
    router=("mlp.gate.weight",),
    aliases={
        "q_proj": _QUERY,
        "k_proj": _KEY_VALUE,
        "v_proj": _KEY_VALUE,
        **mixture_aliases("mlp.shared_experts", "mlp"),
    },
    buffers=("mlp.gate.e_score_correction_bias",),
    pitfalls=(
        "There is no q_proj, k_proj or v_proj: these names resolve to the compressed projections.",
        "Checkpoints store one tensor per expert; transformers fuses them when it loads.",
    ),
    proven=SOFTMAX_ATTENTION,
)
