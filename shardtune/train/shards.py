"""How are gradients clipped? By their norm over all ranks, as torch does it for sharded tensors, on this rank's shards.

Like the optimizers', for speed: each operation on hundreds of sharded tensors costs torch tens of milliseconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def clip_gradients(trained: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients down to `max_norm` (0: never) and return their norm over all ranks before that."""
    norm = clip_shards(trained, max_norm or math.inf)
    if norm is None:
        norm = nn.utils.clip_grad_norm_(trained, max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def clip_shards(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor | None:
    """Scale the gradients down to `max_norm`, by the same operations in the same order as `clip_grad_norm_` of torch.

    A collective, of one small vector, that no host waits for.

    Returns:
        The norm over all ranks, before; or None, and nothing is done, where the gradients are not what FSDP2 makes of
        one mesh: torch knows what to do about those.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not _sharded_alike(gradients):
        return None
    mesh = gradients[0].device_mesh  # type: ignore[attr-defined]
    last = mesh.ndim - 1
    shards = [local_shard(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(shards, 2.0))  # of each tensor
    if mesh.size(last) > 1:  # replicas have the same gradients by now
        squares = norms**2
        dist.all_reduce(squares, group=mesh.get_group(last))
        norms = squares**0.5
    total: torch.Tensor = torch.linalg.vector_norm(norms, 2.0)
    torch._foreach_mul_(shards, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds, without `to_local`'s detour through autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sharded_alike(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all are sharded over the last dimension of one mesh, and over no other, in one dtype and on one device
    (its own, or the host with offloaded parameters: the process group has a backend for both)."""
    first = gradients[0] if gradients else None
    if not isinstance(first, DTensor):
        return False
    mesh, kind = first.device_mesh, (first.dtype, first.device)
    for gradient in gradients:
        if not isinstance(gradient, DTensor) or (gradient.dtype, gradient.device) != kind:
            return False
        spec = gradient._spec
        *others, last = spec.placements
        # Equal, not the same: torch keeps what it worked out for a mesh, and hands it out for one that is like it.
        if (spec.mesh is not mesh and spec.mesh != mesh) or type(last) is not Shard:
            return False
        if any(type(placement) is not Replicate for placement in others):
            return False
    return True
