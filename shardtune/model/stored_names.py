"""Which stored tensors belong to the text model, and which are only scales of others? By their names. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardtune.model.safetensors_headers import StoredTensor

SCALE = "_scale_inv"  # as FP8 checkpoints call it, although the codes are multiplied with it
_ACTIVATION_SCALE = re.compile(r"(^|[._])(activation_scale|input_scale)$")


@dataclass(frozen=True)
class TextTensors:
    """The text model's part of a checkpoint.

    Attributes:
        weights: By the text model's names.
        scales: Of weights that are stored in float8, by the weight's name.
        left_out: The wrapper's other parts.
        unused_scales: How many scales of activations there are: nothing here quantises activations with them.
    """

    weights: dict[str, StoredTensor]
    scales: dict[str, StoredTensor]
    left_out: tuple[StoredTensor, ...]
    unused_scales: int


def text_tensors(
    stored: Mapping[str, StoredTensor],
    prefixes: Mapping[str, str] | None,
    ignore: Collection[str],
    parameters: Collection[str] = (),
) -> TextTensors:
    """The text model's tensors, apart from what scales them.

    Args:
        prefixes: For a text model inside a wrapper: stored prefix → the text model's. Other names are skipped.
        ignore: Regular expressions of stored names that are not read (`model.ignore_tensors`).
        parameters: Names that are parameters, whatever they look like.
    """
    skip = [re.compile(pattern) for pattern in ignore]
    meant = {name: tensor for name, tensor in stored.items() if not any(pattern.search(name) for pattern in skip)}
    names, left_out = _unwrapped(meant, prefixes)
    weights: dict[str, StoredTensor] = {}
    scales: dict[str, StoredTensor] = {}
    unused = 0
    for name, tensor in names.items():
        if is_activation_scale(name) and name not in parameters:
            unused += 1
        elif name.endswith(SCALE) and name.removesuffix(SCALE) in names:
            scales[name.removesuffix(SCALE)] = tensor
        else:
            weights[name] = tensor
    return TextTensors(weights, scales, tuple(left_out), unused)


def is_activation_scale(name: str) -> bool:
    """By its name: of activations, which nothing here quantises."""
    return _ACTIVATION_SCALE.search(name) is not None


def _unwrapped(
    stored: Mapping[str, StoredTensor], prefixes: Mapping[str, str] | None
) -> tuple[dict[str, StoredTensor], list[StoredTensor]]:
    if prefixes is None:
        return dict(stored), []
    names, left_out = {}, []
    for name, tensor in stored.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            left_out.append(tensor)
        else:
            names[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return names, left_out
