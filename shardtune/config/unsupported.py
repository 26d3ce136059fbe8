"""Which settings do people look for that are not here, why, and what to use instead?"""

from __future__ import annotations

from typing import Any

_FP8 = "use model.base_precision: fp8, which is read, sharded and computed slice by slice"
_NF4 = (
    "4-bit weights (QLoRA, NF4) are not supported: bitsandbytes quantises a weight whole, before it is sharded, and "
    "has no form for fused experts"
)
_NEEDS_WHOLE = "is not supported: it starts from decompositions of whole weights, and no rank holds any whole"
_MORE_RANK = "use use_rslora: true with a higher r"
_NEW_TOKENS = 'use model.new_tokens: ["<|tool|>"]'

# Key, wherever it is written: (why there is no such setting, what to do). The names are those of PEFT's LoraConfig, of
# transformers' BitsAndBytesConfig, and of tools that pass both on.
UNSUPPORTED: dict[str, tuple[str, str]] = {
    "streaming": (
        "rows are not streamed: they are tokenised once, written to data.cache_dir (5 bytes per token) and read from "
        "there by memory map, so memory does not grow with the dataset",
        "remove it; `shardtune data prepare CONFIG` does the work ahead of time",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "quantization_config", "bnb_config", "quantization_bit", "bnb_4bit_compute_dtype",
         "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"),
        (_NF4, _FP8),
    ),
    "load_in_8bit": ("8-bit weights of bitsandbytes are not supported: they are quantised before sharding", _FP8),
    "use_qalora": ("QA-LoRA adapts 4-bit GPTQ weights, which are not read", _FP8),
    "loftq_config": ("LoftQ prepares adapters for 4-bit weights, which are not supported", _FP8),
    "eva_config": (f"EVA {_NEEDS_WHOLE}", _MORE_RANK),
    "corda_config": (f"CorDA {_NEEDS_WHOLE}", _MORE_RANK),
    "lora_ga_config": (f"LoRA-GA {_NEEDS_WHOLE}", _MORE_RANK),
    "peft_type": (
        "only LoRA is trained: its adapters are what is sharded, fused, checkpointed and proven here",
        "remove it; for as few parameters as VeRA or LoHa have, set a small r",
    ),
    "layers_pattern": ("not needed: layers_to_transform counts the decoder layers, known by their class", "remove it"),
    "target_parameters": (
        "fused expert tensors and routers are named in target_modules, as linear layers are",
        "use target_modules: [experts], or a name such as experts.down_proj",
    ),
    **dict.fromkeys(
        ("trainable_token_indices", "added_tokens", "add_tokens", "special_tokens", "additional_special_tokens"),
        ("tokens that the model shall learn are named in the model section, whether or not they exist", _NEW_TOKENS),
    ),
    "lora_bias": (
        "a bias inside of the adapter has no fused form, and most servers do not load it",
        "use lora.bias: lora_only, which trains the biases that adapted layers have",
    ),
    "layer_replication": ("layers are read as the checkpoint has them, never repeated", "save the larger model first"),
    "fan_in_fan_out": ("only linear layers are adapted, which are never stored transposed", "remove it"),
}  # fmt: skip


def why_unsupported(key: str, value: Any) -> tuple[str, str] | None:
    """Why a key that is no setting cannot be had, and what to do; None where nothing is known of it."""
    found = UNSUPPORTED.get(key)
    if found is not None and value in (None, False, "", [], {}):
        return "not a setting here: what it turns off is never on", "remove it"
    return found
