"""Qwen3.5 as a mixture of experts, the text model: three of four layers are gated delta nets."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.names import EXPERTS, SELF_ATTENTION, mixture_meanings
from shardtune.model.families.wrappers import QWEN3_5_MOE

_LINEAR_ATTENTION = (
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_a",
    "linear_attn.out_proj",
)

FAMILY = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text",),
    causal_lm={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    decoder_layer={"qwen3_5_moe_text": "Qwen3_5MoeDecoderLayer"},
    attention=(*_LINEAR_ATTENTION, *SELF_ATTENTION),
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    experts=EXPERTS,
    router=("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    wrappers=(QWEN3_5_MOE,),
    meanings=mixture_meanings("mlp.shared_expert"),
    pitfalls=(
        "Released as a vision+text wrapper; the text model is inside.",
        "Without the packages flash-linear-attention and causal-conv1d transformers computes the delta nets in plain "
        "torch, many times slower.",
    ),
    proven=frozenset({"fused_loss", "fused_experts", "selective"}),
    unfit={"packing": "gated delta nets carry a state along the whole row, whatever documents it holds"},
)
