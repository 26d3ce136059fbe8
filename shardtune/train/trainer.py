"""The loop is TRL's. What is ours: data order, evaluation by tokens, checkpoints of the adapter alone, stopping."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from shardtune.checkpoint.adapter import gather_adapter, write_adapter
from shardtune.checkpoint.store import CheckpointStore
from shardtune.data.collate import REAL_TOKENS, Collator
from shardtune.data.order import Documents, StepLoader, StepOrder
from shardtune.data.tokens import IGNORED
from shardtune.errors import ShardtuneError
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import Processes
from shardtune.train.interrupt import StopRequest, ignore_stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase, TrainerControl
    from trl import SFTConfig


class EvaluationStopped(Exception):
    """The run was asked to stop, and an evaluation may take longer than the time it is given."""


class ShardedSFTTrainer(SFTTrainer):
    """SFTTrainer for a model that is sharded and rows that are tokenised before it is made.

    Can: train over `StepOrder`, evaluate weighted by tokens, write adapter checkpoints through a `CheckpointStore`.
    Leaves to TRL: loss, optimizer, schedule, clipping, logging, trackers.
    """

    def __init__(
        self,
        model: PeftModel,
        args: SFTConfig,
        train_rows: Documents,
        eval_rows: Documents | None,
        collator: Collator,
        tokenizer: PreTrainedTokenizerBase,
        processes: Processes,
        store: CheckpointStore,
        events: EventLog,
        callbacks: list[TrainerCallback],
    ) -> None:
        self.processes, self.store, self.events = processes, store, events
        self.train_rows, self.eval_rows, self.collator = train_rows, eval_rows, collator
        self.stop_evaluating: Callable[[], bool] = lambda: False
        self.real_tokens = 0  # trained on so far by this rank, padding not counted
        self.paused_seconds = 0.0  # evaluating and saving, which throughput does not count
        self.best: tuple[float, int] | None = None  # lowest validation loss among the checkpoints, and its step
        super().__init__(
            model=model,
            args=args,
            # TRL wants a `datasets` object to look at; ours are memory-mapped, and read by our own loaders only.
            train_dataset=Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]}),
            eval_dataset=Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]}) if eval_rows else None,
            processing_class=tokenizer,
            data_collator=collator,
            callbacks=callbacks,
        )

    def get_train_dataloader(self) -> StepLoader:
        return self._loader(
            self.train_rows,
            self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> StepLoader:
        assert self.eval_rows is not None
        return self._loader(self.eval_rows, self.args.per_device_eval_batch_size, accumulation=1, seed=None)

    def _loader(self, rows: Documents, micro_batch: int, *, accumulation: int, seed: int | None) -> StepLoader:
        order = StepOrder(
            len(rows),
            micro_batch=micro_batch,
            accumulation=accumulation,
            world_size=self.processes.world_size,
            rank=self.processes.rank,
            seed=seed,
        )
        return StepLoader(
            rows,
            batch_sampler=order,
            collate_fn=self.collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=ignore_stop_signals,
        )

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Loss per supervised token over all ranks. (The stock loop averages batch means: a short row weighs as much as
        a long one, and the result depends on the batch size.)"""
        began = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)  # summed loss, supervised tokens
        for inputs in dataloader:
            if self.stop_evaluating():
                self.model.train(was_training)
                raise EvaluationStopped
            self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            inputs.pop(REAL_TOKENS)
            inputs = self._prepare_inputs(inputs)
            one = torch.ones((), device=self.args.device)
            with torch.no_grad():
                # Normalised by 1 the loss is a sum; TRL has multiplied it by the ranks it will be averaged over.
                loss = self.compute_loss(self.model, inputs, num_items_in_batch=one) / self.processes.world_size
            supervised = (inputs["labels"][:, 1:] != IGNORED).sum()
            total += torch.stack([loss.double().cpu(), supervised.double().cpu()])
        dist.all_reduce(total, group=self.processes.control)
        self.model.train(was_training)
        loss_per_token = (total[0] / total[1]).item()
        self.paused_seconds += time.perf_counter() - began
        return EvalLoopOutput(
            predictions=np.empty(0),  # never gathered: the loss is all that is asked for
            label_ids=None,
            metrics={f"{metric_key_prefix}_loss": loss_per_token, f"{metric_key_prefix}_tokens": int(total[1])},
            num_samples=len(dataloader.dataset),
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As TRL does; one that is cut short because the run stops gives no result, and never the best one."""
        try:
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        except EvaluationStopped:
            self.control.should_training_stop = self.control.should_save = True
            return {"eval_loss": math.inf}
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Gather the adapter (all ranks), write it (rank 0). The stock way pickles rank 0's shard of the optimizer."""
        began = time.perf_counter()
        step = self.state.global_step
        # The Trainer's own best may be a step that was evaluated but never saved.
        if (loss := self.eval_loss_at(step)) is not None and (self.best is None or loss < self.best[0]):
            self.best = (loss, step)
        tensors = gather_adapter(self.model)
        if self.processes.is_main:
            state = {
                "step": step,
                "epoch": self.state.epoch,
                "best_step": self.best[1] if self.best else None,
                "best_eval_loss": self.best[0] if self.best else None,
                "log_history": self.state.log_history,
            }
            path = self.store.write(
                step,
                lambda folder: write_adapter(self.model, tensors, folder),
                state,
                best_step=self.best[1] if self.best else None,
            )
            self.events.write("checkpoint", step=step, path=str(path), seconds=round(time.perf_counter() - began, 3))
        dist.barrier(group=self.processes.control)
        self.paused_seconds += time.perf_counter() - began

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.real_tokens += inputs.pop(REAL_TOKENS)
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def eval_loss_at(self, step: int) -> float | None:
        """The validation loss measured at `step`, if it was."""
        found = (entry for entry in reversed(self.state.log_history) if entry["step"] == step and "eval_loss" in entry)
        return next((entry["eval_loss"] for entry in found), None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL logs, but a loss that is no number ends the run: every later step would only spread it."""
        if "loss" in logs:
            # TRL counts one row of a packed batch only, and padding as tokens.
            counted = torch.tensor([self.real_tokens])
            dist.all_reduce(counted, group=self.processes.control)
            self._metrics["train"]["num_tokens"] = [int(counted)]
        super().log(logs, start_time)
        for name in ("loss", "grad_norm", "eval_loss"):
            value = logs.get(name)
            if value is not None and not math.isfinite(value):
                raise ShardtuneError(
                    f"The {name.replace('_', ' ')} is {value} at step {self.state.global_step}; the run is stopped.",
                    why="From here on the adapter would hold nothing but such values.",
                    fix="Lower train.learning_rate, raise the warm-up, or look for broken rows in the data. "
                    "Checkpoints written before are good.",
                )


class StopAtStep(TrainerCallback):
    """Ends training on every rank at the same step once any rank was asked to stop."""

    def __init__(self, stop: StopRequest, processes: Processes) -> None:
        self.stop, self.processes = stop, processes
        self.stopped = False

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.processes.agree(self.stop.requested):
            self.stopped = True
            control.should_training_stop = True

    def now(self) -> bool:
        """Asked between the batches of an evaluation, by every rank."""
        self.stopped = self.stopped or self.processes.agree(self.stop.requested)
        return self.stopped
