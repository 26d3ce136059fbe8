"""gpt-oss: routed experts with biases, attention sinks; every other layer sees a window."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import EXPERTS, SELF_ATTENTION, mixture_aliases

_SINKS = "attention has sinks (s_aux), which only eager attention computes"

FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    causal_lm={"gpt_oss": "GptOssForCausalLM"},
    decoder_layer={"gpt_oss": "GptOssDecoderLayer"},
    attention=SELF_ATTENTION,
    experts=EXPERTS,
    router=("mlp.router.weight",),
    aliases=mixture_aliases(),
    layer_types={"gpt_oss": full_every(2)},
    own_attention="eager",
    router_loss=True,
    pitfalls=(
        "Released in MXFP4, which is not supported: use a bf16 checkpoint.",
        "Attention is eager: sinks are part of the softmax, which sdpa does not compute.",
        "Routed experts have biases and are stored as (experts, in, out): neither LoRA nor FP8 storage.",
    ),
    proven=frozenset({"fused_loss"}),
    unsupported={
        "packing": "transformers builds its attention masks without position_ids, so documents are not separated",
        "varlen": _SINKS,
        "whole_rows": _SINKS,
        "selective": "its experts add biases in place to the products that would be kept",
        "fused_experts": "experts have biases and are stored as (experts, in, out)",
    },
)
