"""What are some public models made of? Their config.json, and the headers that their weights would have."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from shardtune.config.schema import ModelSection
from shardtune.model.outline import Outline, read_outline
from shardtune.model.safetensors_headers import StoredTensor

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 5120, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16",
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "Qwen3-14B": {**_QWEN3, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "Qwen3-32B": {**_QWEN3, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Llama-3.3-70B": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    },
    "Mistral Small 4": {
        "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "hidden_size": 4096,
        "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "num_hidden_layers": 36, "num_attention_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072, "dtype": "bfloat16",
    },
}  # fmt: skip
# Of recipes in configs/, too small for the README's table.
_SMALL: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2-135M": {
        **_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
_IN_FLOAT8 = ("Mistral Small 4",)  # as they are published


@cache
def outline_of_public(name: str) -> Outline:
    """The outline that a download of it would have."""
    config = dict(CONFIGS[name] if name in CONFIGS else _SMALL[name])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        section = ModelSection(model_name_or_path=folder)
        return read_outline(section, Path(folder), dict(_headers(config, float8=name in _IN_FLOAT8)))


def _headers(config: Mapping[str, Any], *, float8: bool) -> Iterator[tuple[str, StoredTensor]]:
    for name, shape in shapes_of(config):
        coded = float8 and len(shape) > 1 and ".layers." in name and not name.endswith("mlp.gate.weight")
        yield name, _tensor(name, shape, "float8_e4m3fn" if coded else "bfloat16")
        if coded:
            yield f"{name}_scale_inv", _tensor(f"{name}_scale_inv", (), "float32")


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    width = {"float32": 4, "bfloat16": 2}.get(dtype, 1)
    return StoredTensor(name, Path("model.safetensors"), dtype, shape, 0, prod(shape) * width)


def shapes_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, hidden)
    in_a_layer = {**(_mla(config) if "kv_lora_rank" in config else _attention(config)), **_feed_forward(config)}
    in_a_layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in in_a_layer.items():
            yield f"model.layers.{layer}.{name}", shape


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        **(norms if config["model_type"].startswith("qwen3") else {}),
    }


def _mla(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, keys, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "self_attn.q_a_proj.weight": (queries, hidden),
        "self_attn.q_a_layernorm.weight": (queries,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), queries),
        "self_attn.kv_a_proj_with_mqa.weight": (keys + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (keys,),
        "self_attn.kv_b_proj.weight": (heads * (nope + values), keys),
        "self_attn.o_proj.weight": (hidden, heads * values),
    }


def _feed_forward(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    experts = config.get("num_experts") or config.get("n_routed_experts")
    if experts is None:
        return _gated("mlp", config["intermediate_size"], hidden)
    width = config["moe_intermediate_size"]
    shared = _gated("mlp.shared_experts", width, hidden) if config.get("n_shared_experts") else {}
    return {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
        **shared,
    }


def _gated(name: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }
