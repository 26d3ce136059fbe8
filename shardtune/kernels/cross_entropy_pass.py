"""How does a row of logits become its loss and its gradient? Read twice and written once, in one Triton kernel.

Imported where there is a GPU alone. `kernels.cross_entropy` holds the twin and says what it means.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from shardtune.kernels.cross_entropy import Terms, TokenLoss

_SPAN = 8192  # logits that are read at once


def loss_and_gradient(logits: Tensor, labels: Tensor, token_loss: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy.loss_and_gradient`; the gradient takes the place of the logits (n, vocabulary), contiguous."""
    rows, columns = logits.shape
    stats = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        span = min(_SPAN, triton.next_power_of_2(columns))
        _take_loss[(rows,)](
            logits, labels, stats, rows, token_loss.factor,
            TERMS=_compiled(token_loss.terms), USES_MEAN=token_loss.uses_mean, COLUMNS=columns, SPAN=span,
            num_warps=max(4, min(16, span // 512)),
        )  # fmt: skip
    sums = stats.sum(dim=1)
    return sums[0], sums[1:], logits


@cache
def _compiled(terms: Terms) -> Any:
    """The loss's own arithmetic: the kernel calls the same function as the twin does."""
    return triton.jit(terms)


@triton.jit
def _take_loss(  # type: ignore[no-untyped-def]
    logits, labels, stats, rows, factor,
    TERMS: tl.constexpr, USES_MEAN: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * COLUMNS
    label = tl.load(labels + row)
    # Before anything is written: the sums below make all threads wait for each other.
    chosen = tl.load(logits + label).to(tl.float32)
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    plain = 0.0
    for start in range(0, COLUMNS, SPAN):
        place = start + tl.arange(0, SPAN)
        inside = place < COLUMNS
        value = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, axis=0))
        weight = tl.exp(value - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, weight * value, 0.0), axis=0)
        if USES_MEAN:
            plain += tl.sum(tl.where(inside, value, 0.0), axis=0)
        top = higher
    log_sum = tl.log(total)  # of logits that are shifted so that the largest is 0
    label_logit = chosen - top
    mean = plain / COLUMNS - top
    loss, by_log_sum, by_label, by_mean = TERMS(log_sum, label_logit, tl.exp(label_logit - log_sum), mean, factor)
    tl.store(stats + row, loss)
    tl.store(stats + rows + row, log_sum + top - weighted / total)
    tl.store(stats + 2 * rows + row, (chosen == top).to(tl.float32))
    for start in range(0, COLUMNS, SPAN):
        place = start + tl.arange(0, SPAN)
        inside = place < COLUMNS
        value = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = by_log_sum * (tl.exp(value - top) / total) + by_label * (place == label).to(tl.float32)
        if USES_MEAN:
            gradient += by_mean / COLUMNS
        tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=inside)
