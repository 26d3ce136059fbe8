"""Llama 4, the text model: routed experts and a shared one; three of four layers attend within chunks."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import chunks_with_positions
from shardtune.model.families.names import SELF_ATTENTION, mixture_aliases
from shardtune.model.families.wrappers import LLAMA4

FAMILY = Family(
    name="llama4",
    model_types=("llama4_text",),
    causal_lm={"llama4_text": "Llama4ForCausalLM"},
    decoder_layer={"llama4_text": "Llama4TextDecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    shared_experts=(
        "feed_forward.shared_expert.gate_proj",
        "feed_forward.shared_expert.up_proj",
        "feed_forward.shared_expert.down_proj",
    ),
    experts=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    router=("feed_forward.router.weight",),
    wrappers=(LLAMA4,),
    aliases=mixture_aliases("feed_forward.shared_expert", "feed_forward"),
    layer_types={"llama4_text": chunks_with_positions},
    pitfalls=("Routed experts are (experts, in, out) and scale their inputs: neither LoRA nor FP8 storage.",),
    proven=frozenset({"fused_loss", "selective"}),
    unsupported={
        "packing": "attention chunks and the scaling of queries count from the start of the row",
        "fused_experts": "the inputs of an expert are scaled, not its outputs",
    },
)
