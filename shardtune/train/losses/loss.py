"""What does a batch cost? The training objective that the config names, and the loss that evaluation reports."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardtune.data.collate import SUPERVISED, TARGETS
from shardtune.errors import UserInputError
from shardtune.kernels.cross_entropy import TokenLoss, loss_of_logits
from shardtune.train.losses import nll
from shardtune.train.losses.fused import TOKEN_LOSS, use_fused_loss
from shardtune.train.losses.label_smoothing import smoothed_nll

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shardtune.config.schema import TrainSection
    from shardtune.model.families.family import Family


@dataclass(frozen=True)
class LossOutput:
    """Of one micro-batch.

    Args:
        loss: Summed over the supervised tokens, float32, with a gradient.
        token_stats: (2,), float32: summed entropy of the predictions, and how many labels were the likeliest token.
        aux_loss: The routers' load-balancing loss, unweighted; None where it is not part of the objective.
    """

    loss: Tensor
    token_stats: Tensor
    aux_loss: Tensor | None


@dataclass(frozen=True)
class Loss:
    """Computes losses of batches that are on the model's device; `build_loss` makes it.

    Args:
        token_loss: What training minimises for each supervised token.
        router_coefficient: Weight of the routers' load-balancing loss in the objective; 0 = it is not computed.
        fused: The model's forward computes the loss without logits (`use_fused_loss`).
    """

    token_loss: TokenLoss
    router_coefficient: float
    fused: bool

    @property
    def description(self) -> str | None:
        """What a run says of its objective; None where that is the negative log-likelihood and nothing else."""
        if self.token_loss is nll.LOSS and not self.router_coefficient:
            return None
        routers = f" + {self.router_coefficient:g} × the routers' auxiliary loss (train.router_aux_loss_coef: 0 = off)"
        added = routers if self.router_coefficient else ""
        return f"{self.token_loss.description}{added}; evaluation reports the negative log-likelihood alone"

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> LossOutput:
        """The training objective."""
        return self._compute(model, inputs, self.token_loss, with_aux_loss=self.router_coefficient > 0)

    def evaluate(self, model: nn.Module, inputs: Mapping[str, Any]) -> LossOutput:
        """The negative log-likelihood, whatever is trained on: comparable between runs."""
        return self._compute(model, inputs, nll.LOSS, with_aux_loss=False)

    def _compute(
        self, model: nn.Module, inputs: Mapping[str, Any], token_loss: TokenLoss, *, with_aux_loss: bool
    ) -> LossOutput:
        given = {name: value for name, value in inputs.items() if name != "labels"}
        given["use_cache"] = False
        if with_aux_loss:
            given["output_router_logits"] = True
        if self.fused:
            return LossOutput(*model(**given, **{TOKEN_LOSS: token_loss}))
        where, targets = given.pop(SUPERVISED), given.pop(TARGETS)
        outputs = model(**given)
        loss, token_stats = loss_of_logits(outputs.logits.flatten(0, -2)[where], targets, token_loss)
        return LossOutput(loss, token_stats, outputs.aux_loss if with_aux_loss else None)


def build_loss(train: TrainSection, model: PreTrainedModel, family: Family) -> Loss:
    """The loss of a run; where it is fused, `model.forward` is replaced. Call it before sharding.

    Args:
        train: Resolved: `fused_loss` is true or false, and `router_aux_loss_coef` null only without such a loss.
        model: The base model, with its adapters.

    Raises:
        UserInputError: a combination that has no meaning.
    """
    loss = Loss(_token_loss(train), train.router_aux_loss_coef or 0.0, train.fused_loss is True)
    if loss.fused:
        causal = family.why_not("packing", model.config) is None
        use_fused_loss(model, causal=causal, router_coefficient=loss.router_coefficient)
    return loss


def _token_loss(train: TrainSection) -> TokenLoss:
    if not train.label_smoothing_factor:
        token_loss: TokenLoss = importlib.import_module(f"shardtune.train.losses.{train.loss}").LOSS
        return token_loss
    if train.loss != "nll":
        raise UserInputError(
            f"train.label_smoothing_factor is {train.label_smoothing_factor:g}, but train.loss is {train.loss}.",
            why="Label smoothing is defined for the negative log-likelihood alone; TRL ignores it with dft.",
            fix="Set train.label_smoothing_factor: 0, or train.loss: nll.",
        )
    return smoothed_nll(train.label_smoothing_factor)
