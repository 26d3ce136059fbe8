"""How is the loss taken without ever holding all logits? Head and loss together, some rows at a time.

Only supervised positions are multiplied with the head. The gradient of a chunk's logits is known as soon as they are,
so it is multiplied back at once and the logits are dropped: what stays is one gradient of the hidden states' size. The
eager twin is `linear_cross_entropy_reference`. Which loss it is (`TokenLoss`) is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_CHUNK_BYTES = 512 << 20  # of logits in the hidden states' dtype

# (log_sum, label, probability, mean, factor) -> (loss, its derivatives by log_sum, label and mean); see TokenLoss.
Terms = Callable[[Any, Any, Any, Any, float], tuple[Any, Any, Any, Any]]


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token with logits z over V tokens and label y, in two forms that agree.

    Args:
        description: A few words for people.
        eager: `(logits, labels, factor)`: logits (n, V) in float32 to losses (n,), differentiated by autograd. It
            defines what the loss means.
        terms: The fused form. From log Σ exp z, z[y], the label's probability and the mean of z of a row, all of z
            minus its largest value, which keeps small losses exact: the loss, and its derivatives by the first, the
            second and the mean. The gradient of the logits is `by_log_sum · softmax(z) + by_label · onehot(y) + by_mean
            / V`. It is called with tensors (n,), and compiled by Triton for single rows, which allows operators and
            annotations by builtin types alone.
        factor: A number of the loss's own.
        uses_mean: Whether `terms` looks at the mean, which is not computed otherwise.
    """

    description: str
    eager: Callable[[Tensor, Tensor, float], Tensor]
    terms: Terms
    factor: float = 0.0
    uses_mean: bool = False


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    where: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The losses of the logits `hidden[where] @ head.T` against `labels`, summed, in float32.

    Args:
        hidden: (positions, hidden size).
        head: (vocabulary, hidden size), frozen.
        where: (n,), the positions that predict something, each once.
        labels: (n,), what they have to predict.
        token_loss: The loss of one of them.
        ids: (k,), rows of the head that `rows` stand in for, each once.
        rows: (k, hidden size); they train.

    Returns:
        The summed loss; and, without a gradient, `token_stats` (2,): the summed entropy of the predictions and how many
        labels were the likeliest token.
    """
    loss, token_stats = _LinearCrossEntropy.apply(hidden, head, where, labels, token_loss, ids, rows)
    return loss, token_stats


def linear_cross_entropy_reference(
    hidden: Tensor,
    head: Tensor,
    where: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The meaning of `linear_cross_entropy`."""
    if ids is not None and rows is not None:
        head = head.index_copy(0, ids, rows.to(head.dtype))
    return loss_of_logits(F.linear(hidden[where], head), labels, token_loss)


def loss_of_logits(logits: Tensor, labels: Tensor, token_loss: TokenLoss) -> tuple[Tensor, Tensor]:
    """The summed loss of logits (n, vocabulary) by its eager form, and `token_stats`, both in float32."""
    logits = logits.float()
    return token_loss.eager(logits, labels, token_loss.factor).sum(), _token_stats(logits.detach(), labels)


def _token_stats(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    correct = (logits.amax(dim=-1) == logits.gather(-1, labels[:, None])[:, 0]).sum()
    return torch.stack([entropy, correct.float()])


def loss_and_gradient(logits: Tensor, labels: Tensor, token_loss: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss by its fused form, `token_stats`, and the loss's gradient for the logits in their own dtype."""
    values = logits.float()
    top = values.amax(dim=-1)
    weights = (values - top[:, None]).exp()
    total = weights.sum(dim=-1)
    log_sum = total.log()  # of logits that are shifted so that the largest is 0
    label = values.gather(-1, labels[:, None])[:, 0] - top
    mean = values.mean(dim=-1) - top if token_loss.uses_mean else 0.0
    entropy = log_sum + top - (weights * values).sum(dim=-1) / total
    probability = (label - log_sum).exp()
    loss, by_log_sum, by_label, by_mean = token_loss.terms(log_sum, label, probability, mean, token_loss.factor)
    gradient = weights * (by_log_sum / total)[:, None]
    gradient[torch.arange(len(labels), device=logits.device), labels] += by_label
    if token_loss.uses_mean:
        gradient += (by_mean * torch.ones_like(loss))[:, None] / logits.shape[-1]
    token_stats = torch.stack([entropy.sum(), (label == 0).float().sum()])
    return loss.sum(), token_stats, gradient.to(logits.dtype)


@cache
def _on_gpu() -> Callable[[Tensor, Tensor, TokenLoss], tuple[Tensor, Tensor, Tensor]]:
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
        token_loss: TokenLoss,
        ids: Tensor | None,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chunk_loss = _on_gpu() if hidden.is_cuda else loss_and_gradient
        chunk = -(-_CHUNK_BYTES // (head.shape[0] * hidden.element_size() * 128)) * 128
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        token_stats = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        of_rows = torch.zeros_like(rows, dtype=torch.float32) if rows is not None and ctx.needs_input_grad[6] else None
        own = rows.to(head.dtype) if rows is not None else None
        for positions, tokens in zip(where.split(chunk), labels.split(chunk), strict=True):
            states = hidden.index_select(0, positions)
            logits = states @ head.t()
            if own is not None and ids is not None:
                logits.index_copy_(1, ids, states @ own.t())
            loss, stats, grad_logits = chunk_loss(logits, tokens, token_loss)
            total += loss
            token_stats += stats
            if own is not None and ids is not None:
                grad_own = grad_logits.index_select(1, ids)
                grad_logits.index_fill_(1, ids, 0)
            if of_rows is not None:
                of_rows += grad_own.t() @ states
            if gradient is not None:
                back = grad_logits @ head
                gradient.index_copy_(0, positions, back if own is None else back.addmm_(grad_own, own))
                del back
            del states, logits, grad_logits  # before the next chunk's are allocated
        ctx.save_for_backward(gradient, of_rows)
        ctx.mark_non_differentiable(token_stats)
        return total, token_stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _token_stats: Tensor) -> tuple[Tensor | None, ...]:
        gradient, of_rows = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return gradient, None, None, None, None, None, of_rows
