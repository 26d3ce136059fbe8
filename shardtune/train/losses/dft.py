"""Dynamic Fine-Tuning (arXiv:2508.05629), as TRL defines it: −p(y) · log p(y), the factor p(y) without a gradient."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from shardtune.kernels.cross_entropy import TokenLoss


def eager(logits: Tensor, labels: Tensor, _factor: float) -> Tensor:
    nll = F.cross_entropy(logits, labels, reduction="none")
    return nll * (-nll.detach()).exp()


def terms(
    log_sum: float, label: float, probability: float, mean: float, factor: float
) -> tuple[float, float, float, float]:
    return probability * (log_sum - label), probability, -probability, 0.0


LOSS = TokenLoss("Dynamic Fine-Tuning: negative log-likelihood × probability, of each label", eager, terms)
