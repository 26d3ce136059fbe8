"""Gemma 3, the text model: dense decoders with separate projections and normed queries and keys."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.layer_types import full_every
from shardtune.model.families.names import MLP, MLP_ALIASES, SELF_ATTENTION
from shardtune.model.families.wrappers import GEMMA3

FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    causal_lm={"gemma3_text": "Gemma3ForCausalLM"},
    decoder_layer={"gemma3_text": "Gemma3DecoderLayer"},
    attention=SELF_ATTENTION,
    mlp=MLP,
    aliases=MLP_ALIASES,
    wrappers=(GEMMA3,),
    layer_types={"gemma3_text": full_every(6, "sliding_window_pattern")},
    pitfalls=(
        "The output head shares the embedding's weight and is not stored by itself.",
        "The released checkpoints from 4B up are vision+text: the text model is inside the wrapper.",
    ),
    proven=SOFTMAX_ATTENTION,
)
