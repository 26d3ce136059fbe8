"""What is the loss on the validation rows? Per supervised token over all ranks, whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardtune.data.collate import REAL_TOKENS
from shardtune.parallel.shard import reshard_all
from shardtune.train.batches import Batch, supervised_tokens, to_device
from shardtune.train.metrics import per_token

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.parallel.processes import Processes
    from shardtune.train.losses import Loss


class EvaluationStopped(Exception):
    """The run was asked to stop, and an evaluation may take longer than the grace period."""


@dataclass(frozen=True)
class Validation:
    """The negative log-likelihood per supervised token, whatever the training objective adds to it."""

    loss: float
    tokens: int
    entropy: float
    mean_token_accuracy: float


def validate(
    model: PeftModel,
    loss: Loss,
    batches: Iterable[Batch],
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
    totals = torch.zeros(4, dtype=torch.float64)  # loss, supervised tokens, entropy, correct predictions
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                if stopped():
                    raise EvaluationStopped
                before_batch()
                batch.pop(REAL_TOKENS)
                output = loss.evaluate(model, to_device(batch, processes.device))
                totals[0] += output.loss.double().cpu()
                totals[1] += supervised_tokens([batch])
                totals[2:] += output.token_stats.double().cpu()
    finally:
        model.train(was_training)
        reshard_all(model)  # a checkpoint may be next: of the shards, which the optimizer's state belongs to
    dist.all_reduce(totals, group=processes.control)
    summed, tokens, entropy, correct = totals.tolist()
    return Validation(summed / tokens, int(tokens), **per_token(entropy, correct, tokens))
