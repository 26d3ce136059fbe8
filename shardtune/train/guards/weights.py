"""Are the weights themselves numbers? Asked once a loss or a gradient is none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardtune.model.fill import bare_name
from shardtune.train.shards import local_shard

_PIECE = 1 << 24  # elements looked at at once: memory may be short


def not_finite(model: nn.Module) -> dict[str, bool]:
    """Tensors with NaN or Inf in what this rank holds of them, by their name in the model; does each train?"""
    return {bare_name(name): trains for name, tensor, trains in _tensors(model) if not is_finite(tensor)}


def is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    flat = tensor.detach().reshape(-1)
    if tensor.dtype == torch.float8_e4m3fn:  # has no Inf, and one code for NaN in each sign
        return not any(bool((part.view(torch.uint8) & 0x7F == 0x7F).any()) for part in flat.split(_PIECE))
    return all(bool(part.isfinite().all()) for part in flat.split(_PIECE))


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in model.named_parameters():
        yield name, local_shard(parameter), parameter.requires_grad
    for name, buffer in model.named_buffers():
        yield name, local_shard(buffer), False
