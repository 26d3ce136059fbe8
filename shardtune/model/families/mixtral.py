"""Mixtral: every feed-forward is a mixture of routed experts, without a shared one."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.names import EXPERTS, SELF_ATTENTION, mixture_aliases

FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    causal_lm={"mixtral": "MixtralForCausalLM"},
    decoder_layer={"mixtral": "MixtralDecoderLayer"},
    attention=SELF_ATTENTION,
    experts=EXPERTS,
    router=("mlp.gate.weight",),
    aliases=mixture_aliases(),
    router_loss=True,
    pitfalls=(
        "There is no shared expert and no dense layer: without lora.experts only attention trains.",
        "Checkpoints store one tensor per expert under block_sparse_moe; transformers renames and fuses them.",
        "PEFT takes w1, w2, w3 and gate for names of transformers 4 and puts adapters on the routed experts (of "
        "doubled rank) and the router.",
    ),
    proven=SOFTMAX_ATTENTION,
)
