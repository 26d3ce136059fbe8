"""Qwen3.5, the text model: three of four layers are gated delta nets."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.names import MLP, MLP_MEANINGS, SELF_ATTENTION
from shardtune.model.families.wrappers import QWEN3_5

_LINEAR_ATTENTION = (
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_a",
    "linear_attn.out_proj",
)

FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text",),
    causal_lm={"qwen3_5_text": "Qwen3_5ForCausalLM"},
    decoder_layer={"qwen3_5_text": "Qwen3_5DecoderLayer"},
    attention=(*_LINEAR_ATTENTION, *SELF_ATTENTION),
    mlp=MLP,
    wrappers=(QWEN3_5,),
    meanings=MLP_MEANINGS,
    pitfalls=(
        "Released as a vision+text wrapper; the text model is inside.",
        "Without the packages flash-linear-attention and causal-conv1d transformers computes the delta nets in plain "
        "torch, many times slower.",
    ),
    proven=frozenset({"fused_loss", "selective"}),
    unfit={"packing": "gated delta nets carry a state along the whole row, whatever documents it holds"},
)
