"""The loop is TRL's. What is ours: data order, evaluation by tokens, checkpoints of the adapter alone, stopping."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from shardtune.checkpoint.optimizer import put_optimizer
from shardtune.checkpoint.rng import put_rng
from shardtune.data.collate import REAL_TOKENS, SUPERVISED, Collator
from shardtune.data.order import Documents, StepLoader, StepOrder
from shardtune.data.tokens import IGNORED
from shardtune.parallel.processes import Processes
from shardtune.parallel.shard import reshard_all
from shardtune.run.stop_request import StopRequest, ignore_stop_signals
from shardtune.train.guards.numbers import HostNumber
from shardtune.train.guards.pace import TimedBatches
from shardtune.train.loop_state import put_loss_sum, put_schedule, put_state
from shardtune.train.losses import Loss
from shardtune.train.losses.router import coefficient
from shardtune.train.memory.ledger import BACKWARD, SAVING
from shardtune.train.resume import ResumePoint
from shardtune.train.saving import CheckpointSaver
from shardtune.train.shards import ShardAdamW, clip_shards
from shardtune.train.steps import spare_walks, trained_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase, TrainerControl
    from trl import SFTConfig

    from shardtune.train.guards.watch import Guards
    from shardtune.train.memory.ledger import Ledger


class EvaluationStopped(Exception):
    """The run was asked to stop, and an evaluation may take longer than the time it is given."""


class ShardedSFTTrainer(SFTTrainer):
    """SFTTrainer for a model that is sharded and rows that are tokenised before it is made.

    Can: train over `StepOrder`, evaluate weighted by tokens, save through a `CheckpointSaver`, go on from a
    `ResumePoint` as if nothing had happened.
    Leaves to TRL: loss, schedule, logging, trackers.
    Does as torch and transformers do, in less time: clipping and AdamW (`shards`), what every step asks of the model
    (`steps`).

    Going on hangs on four methods that the Trainer's loop calls in this order; its own way of resuming is not used (it
    unpickles, and refuses a sharded model): `_init_training_state` (where are we?), `_prepare_for_training` (optimizer
    and schedule exist), `_run_epoch` (skip what was seen), `_load_rng_state` (just before the first forward pass).
    """

    aux_loss_enabled: bool  # TRL's: is the routers' auxiliary loss part of the objective?

    def __init__(
        self,
        model: PeftModel,
        args: SFTConfig,
        train_rows: Documents,
        eval_rows: Documents | None,
        collator: Collator,
        tokenizer: PreTrainedTokenizerBase,
        processes: Processes,
        saver: CheckpointSaver,
        resumed: ResumePoint | None,
        callbacks: list[TrainerCallback],
    ) -> None:
        self.processes, self.saver, self.resumed = processes, saver, resumed
        self.guards: Guards | None = None
        self.ledger: Ledger | None = None
        self.loss: Loss | None = None  # set before the first step
        self.train_rows, self.eval_rows, self.collator = train_rows, eval_rows, collator
        self.stop_evaluating: Callable[[], bool] = lambda: False
        self.real_tokens = 0  # trained on so far by this rank, padding not counted
        self.paused_seconds = 0.0  # evaluating and saving, which throughput does not count
        self.data_seconds = 0.0  # waiting for batches
        self.trained: list[torch.nn.Parameter] = []  # known once training begins
        self._parameters_counted: int | None = None
        self.micro_losses: list[HostNumber] = []  # of the step that is computed, on this rank
        self.grad_norm: torch.Tensor | None = None  # of the step that is computed, over all ranks, before clipping
        # By mode, since the last log line: supervised tokens, their predictions' summed entropy, how many were right;
        # the routers' auxiliary loss summed over micro-batches, and their number.
        self.told = {mode: torch.zeros(5, dtype=torch.float64, device=processes.device) for mode in ("train", "eval")}
        base = model.get_base_model()
        if base.base_model is base:  # Llama 4's text model; TRL takes hidden states from `base_model`
            base.base_model_prefix = "model"
        args.router_aux_loss_coef = coefficient(base, args.router_aux_loss_coef)  # TRL would go by the config alone
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
        return self._loader(self.train_rows, self._train_order())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> StepLoader:
        assert self.eval_rows is not None
        order = self._order(self.eval_rows, self.args.per_device_eval_batch_size, accumulation=1, seed=None)
        return self._loader(self.eval_rows, order)

    def rows_of_step(self, step: int, rank: int | None = None, micro: int | None = None) -> list[str]:
        """Names of the rows that step `step` (from 1) trains on: `train:812` is row 812 of the prepared data."""
        rows = self._train_order().rows_of(step - 1, rank, micro)
        return [f"train:{member}" for row in rows for member in self.train_rows.members(row)]

    def _train_order(self) -> StepOrder:
        return self._order(
            self.train_rows,
            self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
        )

    def _order(self, rows: Documents, micro_batch: int, *, accumulation: int, seed: int | None) -> StepOrder:
        return StepOrder(
            len(rows),
            micro_batch=micro_batch,
            accumulation=accumulation,
            world_size=self.processes.world_size,
            rank=self.processes.rank,
            seed=seed,
        )

    def _loader(self, rows: Documents, order: StepOrder) -> StepLoader:
        collator = self.collator
        if collator.fill_to is not None and len(order) > 1:  # otherwise the only batch there is has one shape already
            collator = replace(collator, fill_rows=order.micro_batch)
        return StepLoader(
            rows,
            batch_sampler=order,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=ignore_stop_signals,
            # Its own, or every pass over rows (an evaluation, too) would move the generator that dropout draws from.
            generator=torch.Generator(),
        )

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        """Without accelerate's wrapper around it."""
        bare = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(bare, torch.optim.Optimizer)
        return bare

    def resume_from(self, point: ResumePoint) -> None:
        """The next `train()` begins at `point` with an optimizer and a schedule of its own, as in a new process."""
        self.resumed = point
        for name in ("optimizer", "lr_scheduler"):
            setattr(self, name, None)
        self._metrics["train"].clear()
        self.told["train"].zero_()
        self.model.zero_grad()

    @staticmethod
    def get_optimizer_cls_and_kwargs(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        kind, settings = SFTTrainer.get_optimizer_cls_and_kwargs(*args, **kwargs)
        return ShardAdamW if kind is torch.optim.AdamW else kind, settings

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        begin: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        if self.resumed is None:
            return begin
        put_state(self, self.resumed.trainer)
        kept = self.resumed.trainer.get("guards")
        if self.guards is not None and kept:
            self.guards.restore(kept)
        epoch, done = divmod(self.resumed.step, num_update_steps_per_epoch)
        return epoch, done * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, *args: Any) -> tuple[Any, Any]:
        prepared: tuple[Any, Any] = super()._prepare_for_training(*args)
        self.trained = trained_parameters(self.model)
        spare_walks(self.model, self.trained)
        if self.resumed is not None:
            put_optimizer(self.model, self.bare_optimizer, self.resumed.optimizer)
            put_schedule(self.lr_scheduler, self.resumed.step)
        return prepared

    def _run_epoch(self, **given: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # it ended between its last step and `final/`
            self.control.should_training_stop = True
            return
        if self.resumed is not None and given["epoch"] == given["epochs_trained"]:
            put_loss_sum(self, self.resumed.trainer)
            if self._missed_evaluation(epoch_began=given["steps_trained_in_current_epoch"] == 0):
                self._evaluate(given["trial"], given["ignore_keys_for_eval"])
                self._record_late_evaluation(self.resumed.step)
            # Any value makes the loop skip the batches that were seen (by number, not by reading them).
            given["resume_from_checkpoint"] = str(self.resumed.path)
        super()._run_epoch(**given)

    def _missed_evaluation(self, epoch_began: bool) -> bool:
        """A crash after the checkpoint of a step costs the evaluation that follows it, and a stop cuts it short."""
        step, how = self.state.global_step, self.args.eval_strategy
        due = (how == "epoch" and epoch_began) or (how == "steps" and step % self.args.eval_steps == 0)
        return due and self.eval_loss_at(step) is None

    def _record_late_evaluation(self, step: int) -> None:
        """It counts for the checkpoint the run goes on from, which may be the best one."""
        loss = self.eval_loss_at(step)
        if loss is not None:
            self.saver.record_eval(step, loss)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        assert self.resumed is not None
        if self.resumed.rng is not None:
            put_rng(self.resumed.rng, self.processes.device)
        else:  # other ranks than before: numbers that were not drawn yet
            torch.manual_seed(self.args.seed + self.processes.rank + 1_000_003 * self.resumed.step)

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Loss per supervised token over all ranks. (The stock loop averages batch means: a short row weighs as much as
        a long one, and the result depends on the batch size.)"""
        began = time.perf_counter()
        was_training, balanced = self.model.training, self.aux_loss_enabled
        self.model.eval()
        self.aux_loss_enabled = False  # a mean over tokens has no place for a mean over batches
        try:
            total = self._summed_loss(dataloader)
        finally:
            self.model.train(was_training)
            self.aux_loss_enabled = balanced
            reshard_all(self.model)  # a checkpoint may be next: of the shards, which the optimizer's state belongs to
        dist.all_reduce(total, group=self.processes.control)
        loss_per_token = (total[0] / total[1]).item()
        self.paused_seconds += time.perf_counter() - began
        return EvalLoopOutput(
            predictions=np.empty(0),  # never gathered: the loss is all that is asked for
            label_ids=None,
            metrics={f"{metric_key_prefix}_loss": loss_per_token, f"{metric_key_prefix}_tokens": int(total[1])},
            num_samples=len(dataloader.dataset),
        )

    @torch.no_grad()
    def _summed_loss(self, batches: Any) -> torch.Tensor:
        """Of this rank's rows: loss and supervised tokens."""
        total = torch.zeros(2, dtype=torch.float64)
        one = torch.ones((), device=self.args.device)
        for inputs in batches:
            if self.stop_evaluating():
                raise EvaluationStopped
            self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            inputs.pop(REAL_TOKENS)
            inputs = self._prepare_inputs(inputs)
            # Normalised by 1 the loss is a sum; TRL has multiplied it by the ranks it will be averaged over.
            loss = self.compute_loss(self.model, inputs, num_items_in_batch=one) / self.processes.world_size
            supervised = (inputs["labels"][:, 1:] != IGNORED).sum()
            total += torch.stack([loss.double().cpu(), supervised.double().cpu()])
        return total

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As TRL does; one that is cut short because the run stops gives no result, and never the best one."""
        try:
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        except EvaluationStopped:
            self.control.should_training_stop = self.control.should_save = True
            return {"eval_loss": math.inf}
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Everything, through our store. The stock way pickles rank 0's shard of the optimizer."""
        began = time.perf_counter()
        if self.ledger is not None:
            self.ledger.enter(SAVING)
        self.saver.save(self)
        self.paused_seconds += time.perf_counter() - began

    def _loss_of(self, model: Any, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: Any) -> Any:
        """The run's own loss; TRL's would wait for the device at every batch to read entropy and accuracy back."""
        assert self.loss is not None
        outputs = self.loss(model, inputs) if self.model.training else self.loss.evaluate(model, inputs)
        mode = "train" if self.model.training else "eval"
        supervised = torch.full((1,), float(len(inputs[SUPERVISED])), device=outputs.token_stats.device)
        self.told[mode][:3] += torch.cat([supervised, outputs.token_stats]).double()
        loss = outputs.loss * self.processes.world_size / num_items_in_batch
        if outputs.aux_loss is None:
            return loss
        self.told[mode][3] += outputs.aux_loss.detach()
        self.told[mode][4] += 1
        # As TRL weighs it: the mean over micro-batches and ranks, whatever their tokens.
        return loss + self.loss.router_coefficient * outputs.aux_loss / self.current_gradient_accumulation_steps

    def _prepare_input(self, data: Any) -> Any:
        """transformers' own copies wait until the device has done all work before them: after each the device would
        stand idle while the next step's first kernels are launched. From pinned memory nothing has to wait."""
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device, non_blocking=data.is_pinned())
        return super()._prepare_input(data)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Over the ranks too. transformers copies the count to the device, and waits there as well."""
        if not batch_samples or not all(SUPERVISED in batch for batch in batch_samples):
            return super()._get_num_items_in_batch(batch_samples, device)
        counted = sum(len(batch[SUPERVISED]) for batch in batch_samples)
        if self.processes.world_size == 1:
            return counted
        pinned = torch.tensor(counted, pin_memory=device.type == "cuda")
        total = pinned.to(device, non_blocking=True)
        dist.all_reduce(total)
        return total

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        ready: dict[str, Any] = super()._prepare_inputs(inputs)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if name in ready:  # their number changes with every batch: not a reason to compile again
                torch._dynamo.mark_dynamic(ready[name], 0)
        return ready

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> tuple[list[Any], Any]:
        timed = TimedBatches(epoch_iterator)
        found: tuple[list[Any], Any] = super().get_batch_samples(timed, *args)
        self.data_seconds += timed.seconds
        return found

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As TRL does, but a step that a rollback passes over is not computed: the loop counts it and goes on."""
        real = inputs.pop(REAL_TOKENS)
        if self.guards is not None and self.guards.left_out:
            return torch.zeros((), device=self.args.device)
        self.real_tokens += real
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As transformers counts, which goes through all modules for it at every batch."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs:
            return 0
        if self._parameters_counted is None:
            self._parameters_counted = self.model.num_parameters(exclude_embeddings=True)
        return 6 * int(inputs[name].numel()) * self._parameters_counted

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self._loss_of(model, inputs, return_outputs, num_items_in_batch)
        if self.model.training:
            self.micro_losses.append(HostNumber(loss))
            if self.ledger is not None:
                self.ledger.enter(BACKWARD)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = self._clip_shards(self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _clip_shards(self, max_norm: float) -> torch.Tensor | None:
        """None: to be done as transformers does, which knows of scaled gradients too."""
        return clip_shards(self.trained, max_norm) if self.accelerator.scaler is None else None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> torch.Tensor:
        if grad_norm is None:
            grad_norm = self._clip_shards(math.inf)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        return self.grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        control = self.control
        due = control.should_log or control.should_save or control.should_evaluate or control.should_training_stop
        if self.guards is not None and due:
            self.guards.settle()  # nothing is shown or kept of a step that was not judged
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def eval_loss_at(self, step: int) -> float | None:
        """The validation loss measured at `step`, if it was."""
        found = (entry for entry in reversed(self.state.log_history) if entry["step"] == step and "eval_loss" in entry)
        return next((entry["eval_loss"] for entry in found), None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL logs, with tokens counted over all ranks; an evaluation that gave no number ends the run."""
        if "loss" in logs:
            # TRL counts one row of a packed batch only, and padding as tokens.
            counted = torch.tensor([self.real_tokens])
            dist.all_reduce(counted, group=self.processes.control)
            self._metrics["train"]["num_tokens"] = [int(counted)]
            if self.guards is not None and self.guards.left_out:
                logs.pop("grad_norm", None)  # of a step that was not taken
        self._tell_predictions("train" if "loss" in logs else "eval")
        super().log(logs, start_time)
        if self.guards is not None and "eval_loss" in logs:
            self.guards.evaluated(self.state.global_step, logs["eval_loss"])

    def _tell_predictions(self, mode: str) -> None:
        """Entropy, accuracy and the routers' loss since the last line, under the names TRL gives them."""
        sums = self.told[mode].cpu()
        dist.all_reduce(sums, group=self.processes.control)
        self.told[mode].zero_()
        if sums[0] > 0:
            self._metrics[mode]["entropy"] = [float(sums[1] / sums[0])]
            self._metrics[mode]["mean_token_accuracy"] = [float(sums[2] / sums[0])]
        if sums[4] > 0:
            self._metrics[mode]["aux_loss"] = [float(sums[3] / sums[4])]


class StopAtStep(TrainerCallback):
    """Ends training on every rank at the same step once any rank was asked to stop."""

    def __init__(self, stop: StopRequest, processes: Processes) -> None:
        self.stop, self.processes = stop, processes
        self.stopped = False

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.processes.agree(self.stop.requested):
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True  # inside the loop, where the sums since the last log line are still known

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.stopped and not float(state.epoch).is_integer():
            control.should_evaluate = control.should_save = False  # the loop says "epoch end", but it was cut short

    def now(self) -> bool:
        """Asked between the batches of an evaluation, by every rank."""
        self.stopped = self.stopped or self.processes.agree(self.stop.requested)
        return self.stopped
