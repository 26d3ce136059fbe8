"""How does llama.cpp name an architecture, its settings, its tensors? Of those that were read back and compared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EXPERTS = re.compile(r"model\.layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")
_OF_EXPERT = re.compile(r".*\.experts\.(?P<expert>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_KINDS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass(frozen=True)
class GgufModel:
    """One model type.

    Attributes:
        arch: llama.cpp's name of it.
        interleaved: Its rotary embedding pairs neighbouring values, not the halves of a head: rows of q and k are
            written in another order.
        renormalised: Weights of the chosen experts sum to 1; None: it has no routed experts.
    """

    arch: str
    interleaved: bool = False
    renormalised: bool | None = None


MODELS: Mapping[str, GgufModel] = {
    "llama": GgufModel("llama", interleaved=True),
    "mistral": GgufModel("llama", interleaved=True),
    "qwen2": GgufModel("qwen2"),
    "qwen3": GgufModel("qwen3"),
    "qwen2_moe": GgufModel("qwen2moe", renormalised=False),
    "qwen3_moe": GgufModel("qwen3moe", renormalised=True),
}
# What llama.cpp has too, and why it is not written.
_OTHERS = {
    "mixtral": "transformers cannot read such a file back, so that nothing would be compared.",
    "mistral4": "llama.cpp and the package gguf know it, but nothing here can read such a file back to compare it.",
    "deepseek_v3": "Its kv_b_proj is stored in two parts, and nothing here can read such a file back to compare it.",
}


def gguf_model(config: PretrainedConfig) -> GgufModel:
    """How a text model is written.

    Raises:
        UserInputError: it is of another type, or has a setting that llama.cpp does not compute so.
    """
    kind = str(config.model_type)
    model = MODELS.get(kind)
    if model is None:
        raise UserInputError(
            f"--to gguf: {kind} models are not written as GGUF.",
            why=_OTHERS.get(kind, f"Those that were compared after reading them back are {', '.join(MODELS)}."),
            fix="Export merged weights (--to merged) and convert them with llama.cpp's convert_hf_to_gguf.py.",
        )
    why = _differs(config, model)
    if why is not None:
        raise UserInputError(
            f"--to gguf: this {kind} model has a setting that llama.cpp does not compute in the same way.",
            why=why,
            fix="Export merged weights: --to merged.",
        )
    return model


def _differs(config: PretrainedConfig, model: GgufModel) -> str | None:
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3") or (kind == "llama3" and model.arch != "llama"):
        return f"Its rotary embedding is of type {kind}; default and, for Llama, llama3 are written."
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        return "Its rotary embedding turns a part of each head."
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"Its activation is {config.hidden_act}."
    window, context = getattr(config, "sliding_window", None), config.max_position_embeddings
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = bool(kinds - {"full_attention"}) if kinds else window is not None
    if windows and window is not None and window < context:
        return f"It attends within a window of {window} tokens, which llama.cpp ignores for this architecture."
    if model.renormalised is not None and kinds_of_layers(config) != {"sparse"}:
        return "Some of its layers have no routed experts."
    sums = getattr(config, "norm_topk_prob", True)
    if model.renormalised is not None and bool(sums) != model.renormalised:
        return f"norm_topk_prob is {sums}; llama.cpp computes {model.renormalised} for it."
    return None


def kinds_of_layers(config: PretrainedConfig) -> set[str]:
    """`dense` and `sparse`, of a model with routed experts."""
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    count = config.num_hidden_layers
    return {"sparse" if layer not in dense and (layer + 1) % step == 0 else "dense" for layer in range(count)}


def head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def settings(config: PretrainedConfig, model: GgufModel, rows: int) -> dict[str, int | float]:
    """Metadata below the architecture's name.

    Args:
        rows: Of the embedding.
    """
    found: dict[str, int | float] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim(config),
        "rope.freq_base": float(_rope(config)["rope_theta"]),
        "vocab_size": rows,
    }
    if model.renormalised is not None:
        found["expert_count"] = getattr(config, "num_local_experts", None) or config.num_experts
        found["expert_used_count"] = config.num_experts_per_tok
        width = getattr(config, "moe_intermediate_size", None)
        if width is not None:
            found["expert_feed_forward_length"] = width
        shared = getattr(config, "shared_expert_intermediate_size", None)
        if shared:
            found["expert_shared_feed_forward_length"] = shared
    return found


def rope_factors(config: PretrainedConfig) -> list[float] | None:
    """What each frequency is divided by (`rope_freqs.weight`), where Llama 3 stretches its context."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context, factor, width = float(rope["original_max_position_embeddings"]), float(rope["factor"]), head_dim(config)
    found = []
    for pair in range(0, width, 2):
        turns = context / (2 * math.pi * float(rope["rope_theta"]) ** (pair / width))  # within the first context
        mixed = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1.0 / ((1.0 - mixed) / factor + mixed))
    return found


def experts_of(parameter: str) -> tuple[int, tuple[str, ...]] | None:
    """(layer, what it holds) of a fused parameter of experts: gate and up, or down."""
    found = _EXPERTS.fullmatch(parameter)
    if found is None:
        return None
    return int(found["layer"]), ("gate", "up") if found["kind"] == "gate_up_proj" else ("down",)


def one_expert(stored: str) -> tuple[int, str] | None:
    """(expert, gate|up|down) of a tensor that holds one expert's."""
    found = _OF_EXPERT.fullmatch(stored)
    return (int(found["expert"]), _KINDS[found["kind"]]) if found is not None else None


def is_permuted(parameter: str, model: GgufModel) -> str | None:
    """`q` or `k`, where rows are written in another order."""
    found = re.fullmatch(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)", parameter)
    return found[1] if found is not None and model.interleaved else None


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {})
    return dict(rope.get("full_attention", rope))


def keys_of(found: Mapping[str, int | float], arch: str) -> Iterator[tuple[str, int | float]]:
    for key, value in found.items():
        yield f"{arch}.{key}", value
