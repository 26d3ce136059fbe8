"""Negative log-likelihood of the label: −log p(y)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shardtune.kernels.cross_entropy import TokenLoss


def eager(logits: Tensor, labels: Tensor, _factor: float) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def terms(
    log_sum: float, label: float, probability: float, mean: float, factor: float
) -> tuple[float, float, float, float]:
    return log_sum - label, 1.0, -1.0, 0.0


LOSS = TokenLoss("negative log-likelihood", eager, terms)
