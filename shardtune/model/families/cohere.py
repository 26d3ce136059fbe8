"""Command R, Command R7B and Command A: attention and feed-forward side by side."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION

FAMILY = Family(
    name="cohere",
    model_types=("cohere", "cohere2"),
    causal_lm={"cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM"},
    decoder_layer={"cohere": "CohereDecoderLayer", "cohere2": "Cohere2DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    layer_types={"cohere2": full_every(4, "sliding_window_pattern")},
    pitfalls=(
        "The output head shares the weight of the embedding.",
        "Logits are multiplied by logit_scale: the loss is fused with the head only where that is 1.",
    ),
    proven=SOFTMAX_ATTENTION,
)
