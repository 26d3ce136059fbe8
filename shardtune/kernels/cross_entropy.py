"""How is the loss taken without ever holding all logits? Head and cross entropy together, some rows at a time.

Only supervised positions are multiplied with the head. The gradient of a chunk's logits is known as soon as they are, so
it is multiplied back at once and the logits are dropped: what stays is one gradient of the hidden states' size. The eager
twin is `linear_cross_entropy_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_CHUNK_BYTES = 512 << 20  # of logits in the hidden states' dtype


def linear_cross_entropy(hidden: Tensor, head: Tensor, where: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross entropies of `hidden[where] @ head.T` against `labels`, in float32.

    Args:
        hidden: (positions, hidden size).
        head: (vocabulary, hidden size), frozen.
        where: (n,), the positions that predict something, each once.
        labels: (n,), what they have to predict.
    """
    result: Tensor = _LinearCrossEntropy.apply(hidden, head, where, labels)
    return result


def linear_cross_entropy_reference(hidden: Tensor, head: Tensor, where: Tensor, labels: Tensor) -> Tensor:
    """The meaning of `linear_cross_entropy`."""
    return F.cross_entropy(F.linear(hidden[where], head).float(), labels, reduction="sum")


def _loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and its gradient for the logits in their own dtype."""
    values = logits.float()
    top = values.amax(dim=-1, keepdim=True)
    weights = (values - top).exp()
    total = weights.sum(dim=-1, keepdim=True)
    right = values.gather(-1, labels[:, None])
    loss = (total.log() + top - right).sum()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient = weights / total - (columns == labels[:, None]).float()
    return loss, gradient.to(logits.dtype)


_compiled = torch.compile(_loss_and_gradient, dynamic=True)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, where: Tensor, labels: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        step = _compiled if hidden.is_cuda else _loss_and_gradient
        rows = max(1, _CHUNK_BYTES // (head.shape[0] * hidden.element_size()))
        rows = -(-rows // 128) * 128
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden) if wanted else None
        for positions, tokens in zip(where.split(rows), labels.split(rows), strict=True):
            loss, grad_logits = step(hidden.index_select(0, positions) @ head.t(), tokens)
            total += loss
            if gradient is not None:
                gradient.index_copy_(0, positions, grad_logits @ head)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad if gradient is not None else None), None, None, None
