"""What stands in for weights that are not there? Random ones on the device: for speed and memory, never for results."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardtune.kernels.fp8 import CODES, LARGEST_CODE
from shardtune.model.weight_loading import is_adapter

if TYPE_CHECKING:
    from torch import Tensor, nn

_PIECE = 1 << 27  # elements drawn at once: float8 is drawn in bf16 first


def init_random_base(model: nn.Module, seed: int, spread: float) -> int:
    """Fill every parameter but the adapters, and every stored buffer; returns the bytes this rank holds.

    Vectors become 1 (norms) or 0 (biases), matrices normal with the standard deviation `spread`; float8 codes use their
    whole range, with scales that give the same spread. Each rank draws its own rows: two runs with the same seed and
    number of processes have the same weights.
    """
    held = 0
    with torch.no_grad():
        for name, tensor in _tensors(model):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            held += local.nbytes
            generator = torch.Generator(local.device).manual_seed(_seed(seed, name))
            if name.endswith("_scale_inv"):
                local.fill_(4 * spread / LARGEST_CODE)
            elif local.dtype == CODES:
                _draw(local, LARGEST_CODE / 4, generator)
            elif tensor.dim() > 1:
                _draw(local, spread, generator)
            elif local.is_floating_point():
                local.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                local.zero_()
    return held


def _draw(into: Tensor, spread: float, generator: torch.Generator) -> None:
    flat = into.view(-1)
    for part in flat.split(_PIECE):
        if into.dtype == CODES:
            drawn = torch.empty(part.shape, dtype=torch.bfloat16, device=part.device).normal_(
                0, spread, generator=generator
            )
            part.copy_(drawn.clamp_(-LARGEST_CODE, LARGEST_CODE))
        else:
            part.normal_(0, spread, generator=generator)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = [(name, p) for name, p in model.named_parameters() if not is_adapter(name)]
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}", buffer))
    return found


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
