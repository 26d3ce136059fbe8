"""What does the training loop remember between two steps? All of it as JSON, and back, on any number of processes."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardtune.checkpoint.rng import pack_rng

if TYPE_CHECKING:
    from shardtune.parallel.processes import Processes
    from shardtune.train.trainer import ShardedSFTTrainer


@dataclass(frozen=True)
class RankPart:
    """What only one rank knows: its random state, and its share of sums that are reduced at the next log line."""

    rng: bytes
    loss_sum: float
    flos: float
    real_tokens: int


def gather_parts(trainer: ShardedSFTTrainer) -> list[RankPart]:
    """Every rank's part, on rank 0 (elsewhere empty); through the control group, as nodes may not share a disk."""
    processes: Processes = trainer.processes
    mine = RankPart(
        rng=pack_rng(processes.device),
        loss_sum=trainer._tr_loss.item(),
        flos=float(trainer.current_flos),
        real_tokens=trainer.real_tokens,
    )
    parts = processes.gather({**asdict(mine), "rng": b64encode(mine.rng).decode("ascii")})
    return [RankPart(**{**part, "rng": b64decode(part["rng"])}) for part in parts]


def loop_state(trainer: ShardedSFTTrainer, parts: list[RankPart]) -> dict[str, Any]:
    """The loop's memory, for `trainer.json`: a copy, as it is written while the loop goes on. Floats survive JSON.

    Sums since the last log line are in it: a checkpoint between two lines must not lose the losses before it.
    """
    state = trainer.state
    return {
        "step": state.global_step,
        "epoch": state.epoch,
        "log_history": [dict(entry) for entry in state.log_history],
        "best_metric": state.best_metric,
        "best_global_step": state.best_global_step,
        "num_input_tokens_seen": state.num_input_tokens_seen,
        "total_flos": state.total_flos,
        "last_logged": trainer._globalstep_last_logged,
        "loss_sums": [part.loss_sum for part in parts],
        "flos": sum(part.flos for part in parts),
        "real_tokens": sum(part.real_tokens for part in parts),
        "trl": {
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "tokens": trainer._total_train_tokens,
        },
        "scheduler": {"last_epoch": trainer.lr_scheduler.last_epoch, "last_lr": trainer.lr_scheduler.get_last_lr()},
    }


def put_state(trainer: ShardedSFTTrainer, saved: dict[str, Any]) -> None:
    """Give the Trainer's state back what was saved; before the optimizer is made."""
    state = trainer.state
    state.global_step, state.epoch = saved["step"], saved["epoch"]
    state.log_history = list(saved["log_history"])
    state.best_metric, state.best_global_step = saved["best_metric"], saved["best_global_step"]
    state.num_input_tokens_seen, state.total_flos = saved["num_input_tokens_seen"], saved["total_flos"]
    # Only the sums over all ranks are ever looked at, so rank 0 carries those of a former run.
    main = trainer.processes.is_main
    trainer.real_tokens = saved["real_tokens"] if main else 0
    trainer.current_flos = saved["flos"] if main else 0.0
    trainer._total_train_tokens = saved["trl"]["tokens"]
    for name, values in saved["trl"]["metrics"].items():
        trainer._metrics["train"][name] = list(values)


def put_loss_sum(trainer: ShardedSFTTrainer, saved: dict[str, Any]) -> None:
    """The losses since the last log line; after the loop has set them to zero.

    A line shows their mean over ranks, so on another number of ranks each starts with the mean.
    """
    sums = saved["loss_sums"]
    same = len(sums) == trainer.processes.world_size
    value = sums[trainer.processes.rank] if same else sum(sums) / len(sums)
    trainer._tr_loss = torch.tensor(value, device=trainer.args.device)
    trainer._globalstep_last_logged = saved["last_logged"]


def put_schedule(scheduler: torch.optim.lr_scheduler.LRScheduler, step: int) -> None:
    """Set a fresh schedule to `step`. All of transformers' are a factor by step, so nothing else has to be known: the
    rates are those of a run that was never interrupted, or of the new schedule where the config changed."""
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
