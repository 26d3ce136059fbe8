"""Qwen3 as a mixture of experts: routed experts only, and dense layers where the config names some."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import EXPERTS, MLP, SELF_ATTENTION, mixture_aliases

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    causal_lm={"qwen3_moe": "Qwen3MoeForCausalLM"},
    decoder_layer={"qwen3_moe": "Qwen3MoeDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    experts=EXPERTS,
    router=("mlp.gate.weight",),
    aliases=mixture_aliases("mlp"),
    router_loss=True,
    pitfalls=(
        "There is no shared expert: without lora.experts the feed-forward of a sparse layer does not train.",
        "Checkpoints store one tensor per expert; transformers fuses them when it loads.",
        "PEFT takes gate_proj, up_proj, down_proj and gate for names of transformers 4 and puts adapters on the "
        "routed experts (of doubled rank) and the router. Dense layers are therefore adapted through "
        "target_parameters, which needs lora_dropout: 0.",
    ),
    proven=SOFTMAX_ATTENTION,
)
