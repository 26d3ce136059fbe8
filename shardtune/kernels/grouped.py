"""How is each group of rows multiplied with its own matrix? One grouped product, or a loop where torch has none."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(n, in) times (E, out, in), group by group: (n, out).

    Args:
        ends: (E,) int32, where each group of rows ends. Groups may be empty.
    """
    if grouped_product_works(x, *weight.shape[1:]):
        return F.grouped_mm(x.contiguous(), weight.transpose(-2, -1), offs=ends)
    return torch.cat([F.linear(rows, one) for rows, one in zip(_groups(x, ends), weight.unbind(0), strict=True)])


def grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """(n, out) and (n, in) to (E, out, in): the outer products of each group's rows, added up."""
    if grouped_product_works(x, grad.shape[1], x.shape[1]):
        gradient = F.grouped_mm(grad.contiguous().transpose(0, 1), x.contiguous(), offs=ends)
        # For a group without rows the kernel may leave whatever its memory held (pytorch issue 172439).
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return gradient.masked_fill_(empty[:, None, None], 0)
    return torch.stack([g.T @ rows for g, rows in zip(_groups(grad, ends), _groups(x, ends), strict=True)])


def _groups(x: Tensor, ends: Tensor) -> list[Tensor]:
    bounds = [0, *ends.tolist()]
    return [x[start:end] for start, end in pairwise(bounds)]


def grouped_product_works(x: Tensor, *sizes: int) -> bool:
    """torch's rules: 16-byte strides in every direction; on CUDA, tensor cores of 2020 or later."""
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    if x.device.type not in ("cpu", "cuda") or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    return x.shape[0] > 0 and all(size * x.element_size() % 16 == 0 for size in sizes)
