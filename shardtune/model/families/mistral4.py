"""Mistral Small 4: attention with compressed queries and keys/values (MLA), routed experts and a shared one."""

from __future__ import annotations

from shardtune.model.families.family import SOFTMAX_ATTENTION, Family
from shardtune.model.families.wrappers import MISTRAL3

_QUERY = ("self_attn.q_a_proj", "self_attn.q_b_proj")
_KEY_VALUE = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")
_GATE = ("mlp.shared_experts.gate_proj", "mlp.gate_proj", "mlp.experts.gate_up_proj")
_UP = ("mlp.shared_experts.up_proj", "mlp.up_proj", "mlp.experts.gate_up_proj")
_DOWN = ("mlp.shared_experts.down_proj", "mlp.down_proj", "mlp.experts.down_proj")

FAMILY = Family(
    name="mistral4",
    model_types=("mistral4",),
    causal_lm={"mistral4": "Mistral4ForCausalLM"},
    decoder_layer={"mistral4": "Mistral4DecoderLayer"},
    # q_proj is there instead of the pair of q projections when the config's q_lora_rank is null.
    attention=(*_QUERY, "self_attn.q_proj", *_KEY_VALUE, "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    router=("mlp.gate.weight",),
    aliases={
        "q_proj": _QUERY, "k_proj": _KEY_VALUE, "v_proj": _KEY_VALUE, "gate_proj": _GATE, "up_proj": _UP,
        "down_proj": _DOWN, "w1": _GATE, "w2": _DOWN, "w3": _UP,
    },
    wrappers=(MISTRAL3,),
    min_transformers="5.15.0",
    pitfalls=(
        "The seven common target names exist only in part: matched by name alone they adapt o_proj and the shared "
        "expert. They are resolved to the corresponding layers.",
        "AutoModelForCausalLM does not know the model type: the class has to be named.",
        "from_pretrained on the released vision+text checkpoint silently leaves every parameter uninitialised when "
        "the names are not mapped.",
        "Before transformers 5.15 YaRN's mscale_all_dim was computed incorrectly.",
        "Queries are scaled by their position, so packed rows need position ids that restart with each row.",
        "Dequantising the FP8 release with transformers drops the scales of the experts.",
    ),
    proven=SOFTMAX_ATTENTION,
)  # fmt: skip
