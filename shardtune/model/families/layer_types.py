"""Which kind is each decoder layer where config.json does not list them? As transformers' config classes derive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# From a config that has its class's defaults to the kind of every layer.
LayerTypes = Callable[[Mapping[str, Any]], list[str]]


def full_every(interval: int, key: str = "", other: str = "sliding_attention", *, last: bool = False) -> LayerTypes:
    """Every so-manieth layer sees all tokens.

    Args:
        key: The config's name of the interval, where it may have one.
        other: The kind of the layers between.
        last: The last layer does in any case.
    """

    def kinds(config: Mapping[str, Any]) -> list[str]:
        step, count = config.get(key) or interval, config["num_hidden_layers"]
        return [
            "full_attention" if (number + 1) % step == 0 or (last and number == count - 1) else other
            for number in range(count)
        ]

    return kinds


def all_alike(kind: str) -> LayerTypes:
    return lambda config: [kind] * config["num_hidden_layers"]


def windows_above(config: Mapping[str, Any]) -> list[str]:
    """Qwen 2 and 3: a window, if one is used at all, in the layers from `max_window_layers` on."""
    first = config["max_window_layers"] if config.get("sliding_window") is not None else config["num_hidden_layers"]
    return [
        "full_attention" if number < first else "sliding_attention" for number in range(config["num_hidden_layers"])
    ]


def windows_below(config: Mapping[str, Any]) -> list[str]:
    """Qwen2-MoE: a window, if one is used at all, in every other layer below `max_window_layers`."""
    last = config["max_window_layers"] if config.get("use_sliding_window") else 0
    return [
        "sliding_attention" if number % 2 == 0 and number < last else "full_attention"
        for number in range(config["num_hidden_layers"])
    ]


def windows_if_any(config: Mapping[str, Any]) -> list[str]:
    kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
    return [kind] * config["num_hidden_layers"]


def windows_without_positions(config: Mapping[str, Any]) -> list[str]:
    """SmolLM3: a window, if one is used at all, in layers without position embeddings."""
    windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return ["sliding_attention" if windows and not rotated else "full_attention" for rotated in _rotated(config)]


def chunks_with_positions(config: Mapping[str, Any]) -> list[str]:
    """Llama 4: chunks in layers with position embeddings."""
    return ["chunked_attention" if rotated else "full_attention" for rotated in _rotated(config)]


def listed_attention(config: Mapping[str, Any]) -> list[str]:
    """LFM2: convolutions, but for the layers that `full_attn_idxs` lists."""
    numbers = range(config["num_hidden_layers"])
    listed = config.get("full_attn_idxs")
    return ["full_attention" if listed is None or number in listed else "conv" for number in numbers]


def _rotated(config: Mapping[str, Any]) -> list[int]:
    """Of each layer, whether it has position embeddings."""
    interval = config["no_rope_layer_interval"]
    usual = [int((number + 1) % interval != 0) for number in range(config["num_hidden_layers"])]
    return config.get("no_rope_layers") or usual
