"""What is the loss on the validation rows? Per supervised token over all ranks, whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardtune.data.collate import REAL_TOKENS
from shardtune.data.order import StepOrder
from shardtune.parallel.shard import reshard_all
from shardtune.train.batches import supervised_tokens, to_device
from shardtune.train.metrics import per_token

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.utils.data import DataLoader

    from shardtune.parallel.processes import Processes
    from shardtune.train.losses import Loss


GROUPS = 32  # at 31 degrees of freedom a standard error is itself known to 13 %, and 2 kB of an event are enough


class EvaluationStopped(Exception):
    """The run was asked to stop, and an evaluation may take longer than the grace period."""


@dataclass(frozen=True)
class Validation:
    """The negative log-likelihood per supervised token, whatever the training objective adds to it.

    Attributes:
        groups: The same means, and `tokens`, of at most GROUPS parts of the rows, by name as `eval` events have them.
            How far they lie apart says how much of the mean, and of its difference to another evaluation of the same
            rows, is chance. A group is a stretch of neighbouring batches, the same in every evaluation, on any number
            of ranks: neighbours may be parts of one document and err alike, which groups that share them would hide.
    """

    loss: float
    tokens: int
    entropy: float
    mean_token_accuracy: float
    groups: dict[str, list[float]]


def validate(
    model: PeftModel,
    loss: Loss,
    batches: DataLoader,
    processes: Processes,
    *,
    before_batch: Callable[[], None],
    stopped: Callable[[], bool],
) -> Validation:
    """Evaluate all batches. A collective.

    (The stock loop of transformers averages batch means: a short row weighs as much as a long one, and the result
    depends on the batch size.)

    Raises:
        EvaluationStopped: on every rank, as soon as `stopped` says so.
    """
    # Loss, supervised tokens, entropy, correct predictions of each group.
    sums = torch.zeros(GROUPS, 4, dtype=torch.float64)
    order = batches.batch_sampler
    assert isinstance(order, StepOrder)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for number, batch in enumerate(batches):
                if stopped():
                    raise EvaluationStopped
                before_batch()
                batch.pop(REAL_TOKENS)
                output = loss.evaluate(model, to_device(batch, processes.device))
                # Batches go to ranks in turn: counted so, one has the same number on any number of ranks.
                group = sums[order.part(number * processes.world_size + processes.rank, GROUPS)]
                group[0] += output.loss.double().cpu()
                group[1] += supervised_tokens([batch])
                group[2:] += output.token_stats.double().cpu()
    finally:
        model.train(was_training)
        reshard_all(model)  # a checkpoint may be next: of the shards, which the optimizer's state belongs to
    dist.all_reduce(sums, group=processes.control)
    summed, tokens, entropy, correct = sums.sum(dim=0).tolist()
    return Validation(summed / tokens, int(tokens), **per_token(entropy, correct, tokens), groups=_means(sums))


def _means(sums: torch.Tensor) -> dict[str, list[float]]:
    """Of the groups that have tokens: a rank without a row in the last round adds none."""
    loss, tokens, entropy, correct = sums[sums[:, 1] > 0].unbind(dim=1)
    means = {"loss": loss / tokens, "entropy": entropy / tokens, "token_accuracy": correct / tokens}
    rounded = {name: [float(f"{value:.7g}") for value in values.tolist()] for name, values in means.items()}
    return {"tokens": [int(value) for value in tokens.tolist()], **rounded}
