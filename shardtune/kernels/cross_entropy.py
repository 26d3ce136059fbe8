"""How is the loss taken without ever holding all logits? Head and cross entropy together, some rows at a time.

Only supervised positions are multiplied with the head. The gradient of a chunk's logits is known as soon as they are,
so it is multiplied back at once and the logits are dropped: what stays is one gradient of the hidden states' size. The
eager twin is `linear_cross_entropy_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_CHUNK_BYTES = 512 << 20  # of logits in the hidden states' dtype


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    where: Tensor,
    labels: Tensor,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The cross entropies of `hidden[where] @ head.T` against `labels`, summed, in float32.

    Args:
        hidden: (positions, hidden size).
        head: (vocabulary, hidden size), frozen.
        where: (n,), the positions that predict something, each once.
        labels: (n,), what they have to predict.
        ids: (k,), rows of the head that `rows` stand in for, each once.
        rows: (k, hidden size); they train.

    Returns:
        The summed loss; and, without a gradient, (2,): the summed entropy of the predictions and how many labels were
        the likeliest token.
    """
    loss, told = _LinearCrossEntropy.apply(hidden, head, where, labels, ids, rows)
    return loss, told


def linear_cross_entropy_reference(
    hidden: Tensor,
    head: Tensor,
    where: Tensor,
    labels: Tensor,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The meaning of `linear_cross_entropy`."""
    if ids is not None and rows is not None:
        head = head.index_copy(0, ids, rows.to(head.dtype))
    logits = F.linear(hidden[where], head).float()
    spread = logits.detach().log_softmax(dim=-1)
    entropy = -(spread.exp() * spread).sum()
    right = (logits.detach().amax(dim=-1) == logits.detach().gather(-1, labels[:, None])[:, 0]).sum()
    return F.cross_entropy(logits, labels, reduction="sum"), torch.stack([entropy, right.float()])


def loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, (entropy, right), and the loss's gradient for the logits in their own dtype."""
    values = logits.float()
    top = values.amax(dim=-1, keepdim=True)
    weights = (values - top).exp()
    total = weights.sum(dim=-1, keepdim=True)
    sum_of_logs = total.log() + top
    label = values.gather(-1, labels[:, None])
    entropy = sum_of_logs - (weights * values).sum(dim=-1, keepdim=True) / total
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient = weights / total - (columns == labels[:, None]).float()
    told = torch.stack([entropy.sum(), (label == top).float().sum()])
    return (sum_of_logs - label).sum(), told, gradient.to(logits.dtype)


@cache
def _on_gpu() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    if find_spec("triton") is None:
        return loss_and_gradient
    from shardtune.kernels import cross_entropy_pass

    return cross_entropy_pass.loss_and_gradient


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        where: Tensor,
        labels: Tensor,
        ids: Tensor | None,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        step = _on_gpu() if hidden.is_cuda else loss_and_gradient
        chunk = -(-_CHUNK_BYTES // (head.shape[0] * hidden.element_size() * 128)) * 128
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        told = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        of_rows = torch.zeros_like(rows, dtype=torch.float32) if rows is not None and ctx.needs_input_grad[5] else None
        own = rows.to(head.dtype) if rows is not None else None
        for positions, tokens in zip(where.split(chunk), labels.split(chunk), strict=True):
            states = hidden.index_select(0, positions)
            logits = states @ head.t()
            if own is not None and ids is not None:
                logits.index_copy_(1, ids, states @ own.t())
            loss, also, grad_logits = step(logits, tokens)
            total += loss
            told += also
            if own is not None and ids is not None:
                grad_own = grad_logits.index_select(1, ids)
                grad_logits.index_fill_(1, ids, 0)
            if of_rows is not None:
                of_rows += grad_own.t() @ states
            if gradient is not None:
                back = grad_logits @ head
                gradient.index_copy_(0, positions, back if own is None else back.addmm_(grad_own, own))
        ctx.save_for_backward(gradient, of_rows)
        ctx.mark_non_differentiable(told)
        return total, told

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _told: Tensor) -> tuple[Tensor | None, None, None, None, None, Tensor | None]:
        gradient, of_rows = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return gradient, None, None, None, None, of_rows
