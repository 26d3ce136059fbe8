"""Falcon-H1: state-space layers and softmax attention side by side in every layer."""

from __future__ import annotations

from shardtune.model.families.family import Family
from shardtune.model.families.layer_types import all_alike
from shardtune.model.families.names import SELF_ATTENTION

FAMILY = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    causal_lm={"falcon_h1": "FalconH1ForCausalLM"},
    decoder_layer={"falcon_h1": "FalconH1DecoderLayer"},
    attention=("mamba.in_proj", *SELF_ATTENTION),
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    bypassed=("mamba.out_proj",),
    aliases={"w1": ("feed_forward.gate_proj",), "w2": ("feed_forward.down_proj",), "w3": ("feed_forward.up_proj",)},
    layer_types={"falcon_h1": all_alike("hybrid")},
    pitfalls=(
        "Kernels read the weight of mamba.out_proj without calling it: an adapter there would not train.",
        "Logits are multiplied by lm_head_multiplier: the loss is fused with the head only where that is 1.",
    ),
    proven=frozenset({"fused_loss", "selective"}),
    unsupported={"packing": "state-space layers carry state along the whole row, across documents"},
)
