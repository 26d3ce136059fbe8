"""Are the weights themselves finite? Checked when a loss or a gradient is not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardtune.model.weight_loading import unwrapped_name
from shardtune.train.shards import local_shard

_CHUNK = 1 << 24  # elements checked at once: memory may be short


def non_finite_tensors(model: nn.Module) -> dict[str, bool]:
    """Tensors whose local shard has NaN or Inf, by their name in the model; True for those that train."""
    return {unwrapped_name(name): trains for name, tensor, trains in _tensors(model) if not is_finite(tensor)}


def is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    flat = tensor.detach().reshape(-1)
    if tensor.dtype == torch.float8_e4m3fn:  # has no Inf, and one code for NaN in each sign
        return not any(bool((part.view(torch.uint8) & 0x7F == 0x7F).any()) for part in flat.split(_CHUNK))
    return all(bool(part.isfinite().all()) for part in flat.split(_CHUNK))


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in model.named_parameters():
        yield name, local_shard(parameter), parameter.requires_grad
    for name, buffer in model.named_buffers():
        yield name, local_shard(buffer), False
