"""Label smoothing, as transformers' `LabelSmoother`: (1 − ε) · −log p(y) + ε · mean over the vocabulary of −log p."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shardtune.kernels.cross_entropy import TokenLoss


def eager(logits: Tensor, labels: Tensor, factor: float) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=factor)


def terms(
    log_sum: float, label: float, probability: float, mean: float, factor: float
) -> tuple[float, float, float, float]:
    return log_sum - (1.0 - factor) * label - factor * mean, 1.0, factor - 1.0, -factor


def smoothed_nll(factor: float) -> TokenLoss:
    return TokenLoss(f"negative log-likelihood, labels smoothed by {factor:g}", eager, terms, factor, uses_mean=True)
