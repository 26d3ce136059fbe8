"""Phi 1, 1.5 and 2: attention and a plain two-layer feed-forward side by side."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family

_IN, _OUT = ("mlp.fc1",), ("mlp.fc2",)

FAMILY = Family(
    name="phi",
    model_types=("phi",),
    causal_lm={"phi": "PhiForCausalLM"},
    decoder_layer={"phi": "PhiDecoderLayer"},
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
    mlp=("mlp.fc1", "mlp.fc2"),
    # There is no gate beside the way up: both names mean the projection into the wide space.
    aliases={
        "o_proj": ("self_attn.dense",), "gate_proj": _IN, "up_proj": _IN, "down_proj": _OUT, "w1": _IN, "w2": _OUT,
        "w3": _IN,
    },
    pitfalls=("All linear layers and the output head have biases.",),
    proven=SOFTMAX_ATTENTION - {"fused_loss"},
    unsupported={"fused_loss": "its output head has a bias"},
)  # fmt: skip
