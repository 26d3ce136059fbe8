"""The training loop. One optimizer step, from batch to checkpoint, is `TrainingLoop.train_step`: read it first."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl, TrainerState
from transformers.integrations.neftune import activate_neftune

from shardtune.checkpoint.optimizer import load_optimizer
from shardtune.checkpoint.rng import load_rng
from shardtune.data.collate import REAL_TOKENS
from shardtune.observe.profiler import LLMStepProfiler
from shardtune.observe.progress import ProgressLines
from shardtune.parallel.offload import OffloadedInputs, has_device_memory, offloads_params
from shardtune.plan.schedule import schedule_factor
from shardtune.run.stop_request import Grace, grace_seconds
from shardtune.terminal import say, warn
from shardtune.train.batches import Batch, TrainBatches, eval_loader, supervised_tokens, to_device
from shardtune.train.callbacks import callback_handler, restore_callbacks, training_arguments
from shardtune.train.early_stopping import EarlyStopping
from shardtune.train.guards.alarm import Alarm, RollBack
from shardtune.train.guards.health import HealthChecks
from shardtune.train.guards.machine import gpu_of
from shardtune.train.guards.numbers import HostNumber
from shardtune.train.guards.rollback import roll_back
from shardtune.train.guards.watch import Guards
from shardtune.train.memory.ledger import BACKWARD, DATA, OPTIMIZER
from shardtune.train.memory.ledger import SAVING as SAVING_MEMORY
from shardtune.train.metrics import Metrics, StepTotals
from shardtune.train.optimizers import build_optimizer
from shardtune.train.proof import ProofOfTraining
from shardtune.train.shards import clip_gradients
from shardtune.train.validation import EvaluationStopped, Validation, validate
from shardtune.train.watchdog import BATCH, ENDING, EVALUATING, SAVING, STEP

if TYPE_CHECKING:
    from shardtune.run.stop_request import StopRequest
    from shardtune.train.context import RunContext
    from shardtune.train.losses import LossOutput
    from shardtune.train.memory.ledger import Ledger
    from shardtune.train.resume import ResumePoint
    from shardtune.train.saving import CheckpointSaver
    from shardtune.train.setup import Setup
    from shardtune.train.watchdog import Watchdog


@dataclass(frozen=True)
class Training:
    """What the loop works with."""

    context: RunContext
    setup: Setup  # with its weights loaded
    saver: CheckpointSaver
    stop: StopRequest
    watchdog: Watchdog
    ledger: Ledger


class TrainingLoop:
    """Trains a model that is adapted, sharded and loaded, from the first step or from a checkpoint to the last one.

    What hangs on a step, each called by name in `train_step`: the watchdog (does this rank make progress?), the memory
    ledger (what is allocated in which phase?), guards (is a number wrong?), the proof (does what should train?), users'
    callbacks, trackers and the profiler (`callbacks`), progress lines, checkpoints, requests to stop.

    Attributes:
        stopped: The run was asked to stop, and every rank knows.
        paused_seconds: Spent evaluating and saving, which throughput does not count.
        data_seconds: Spent waiting for batches.
    """

    def __init__(self, training: Training, resumed: ResumePoint | None) -> None:
        setup = training.setup
        self.training, self.resumed = training, resumed
        self.config, self.model, self.loss, self.math = setup.config, setup.model, setup.loss, setup.math
        self.processes, self.watchdog, self.ledger = training.context.processes, training.watchdog, training.ledger
        self.saver = training.saver
        console, events, train = training.context.console, training.context.events, self.config.train
        device = self.processes.device
        self.stopped = False
        self.grad_norm: torch.Tensor | None = None  # of the last step over all ranks, before clipping
        self.learning_rate = 0.0  # of the last step
        self.paused_seconds = self.data_seconds = 0.0
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.batches = TrainBatches(setup.data, train, self.processes)
        self.metrics = Metrics(self.processes)
        health = HealthChecks(self.config.guards, self.processes, gpu_of(device), train.debug_freq)
        self.guards = Guards(self.config.guards, console, events, self.processes, health)
        self.guards.attach(self)
        self.proof = ProofOfTraining(console, events, self.processes)
        self.progress = ProgressLines(console, events)
        self.profiler = LLMStepProfiler(train.debug_freq, self.config.data.max_length, console=console, events=events)
        self.early_stopping = (
            EarlyStopping(train.early_stopping_patience, train.early_stopping_threshold)
            if train.early_stopping_patience is not None
            else None
        )
        self.grace = Grace(grace_seconds(train.grace_seconds, os.environ))
        self.args = training_arguments(self.config, training.context.folder, self.math, on_cpu=device.type == "cpu")
        self.control = TrainerControl()
        self.state = TrainerState()
        self.units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.syncs_once = self._sync_once_pays()
        self.offloading = self._offloading()
        if train.gradient_checkpointing is True:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if train.neftune_noise_alpha is not None:
            activate_neftune(self.model, train.neftune_noise_alpha)

    # The loop.

    def run(self) -> None:
        """All steps, and again from an older checkpoint as often as a guard asks for it."""
        try:
            while (alarm := self._run_until_alarm()) is not None:
                self.progress.close()
                self.resumed = roll_back(alarm, self)
        finally:
            self.progress.close()
            self.profiler.close()
            self.saver.finish()

    def _run_until_alarm(self) -> Alarm | None:
        """A rollback starts again outside of its handler: the exception would keep all that lives in its frames."""
        try:
            self._run()
        except RollBack as back:
            return back.alarm
        return None

    def _run(self) -> None:
        self._begin()
        first, done = divmod(self.state.global_step, self.math.steps_per_epoch)
        for epoch in range(first, math.ceil(self.math.steps / self.math.steps_per_epoch)):
            self.control = self.callbacks.on_epoch_begin(self.args, self.state, self.control)
            steps = self.batches.epoch(epoch, done)
            done = 0
            while (batches := self._next(steps)) is not None:
                self.train_step(batches)
                if self.control.should_training_stop or self.control.should_epoch_stop:
                    break
            if not self.stopped:
                self.control = self.callbacks.on_epoch_end(self.args, self.state, self.control)
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
        self._end()

    def train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over this rank's micro-batches. Whatever happens in a step, happens here in this order."""
        step = self.state.global_step + 1
        began = time.monotonic()
        self.watchdog.enter(STEP, step)
        tokens = self._supervised_over_ranks(batches)
        self.ledger.begin_step(step)
        self.guards.begin_step(step)  # leaves a step out that a rollback passes over
        self.control = self.callbacks.on_step_begin(self.args, self.state, self.control)

        losses: list[HostNumber] = []
        totals = StepTotals.zero(self.processes.device)
        for number, batch in enumerate([] if self.guards.left_out else batches):
            if number:
                self.watchdog.beat()
                self.ledger.begin_micro_batch()
                self.control = self.callbacks.on_substep_end(self.args, self.state, self.control)
            self._sync_gradients(last=number == len(batches) - 1)
            real, supervised = batch.pop(REAL_TOKENS), supervised_tokens([batch])
            with self.offloading:
                output = self.loss(self.model, to_device(batch, self.processes.device))
                loss = self.normalise(output, tokens, len(batches))
                losses.append(HostNumber(loss))
                self.ledger.enter(BACKWARD)
                loss.backward()
            totals.add_micro_batch(output.token_stats, output.aux_loss, supervised, real)

        norm = None if self.guards.left_out else clip_gradients(self.trained, self.config.train.max_grad_norm)
        self.ledger.enter(OPTIMIZER)
        self.control = self.callbacks.on_pre_optimizer_step(self.args, self.state, self.control)
        step_loss = self.guards.judge(step, losses, norm)  # may roll back, end the run, or leave the step out
        if self.guards.left_out:
            self._clear_gradients()
            self.optimizer.step()  # without gradients it changes nothing
        else:
            self.proof.before_optimizer(step)
            self.optimizer.step()
            self.proof.after_optimizer(step, self.optimizer)
            self.metrics.add_step(step_loss, totals)
        self.control = self.callbacks.on_optimizer_step(self.args, self.state, self.control)
        self.grad_norm, self.learning_rate = norm, float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self._clear_gradients()

        self.state.global_step = step
        self.state.epoch = self._epoch_after(step)
        self.ledger.enter(DATA)
        self.guards.end_step(step, moving=not self.guards.left_out and self.learning_rate > 0)
        self.progress.end_step(self.state)
        self._warn_of_short_grace(step, time.monotonic() - began)
        self.saver.poll()
        self.control = self.callbacks.on_step_end(self.args, self.state, self.control)
        self._agree_on_requests()
        self._log_evaluate_save()

    def normalise(self, output: LossOutput, tokens: int | torch.Tensor, micro_batches: int) -> torch.Tensor:
        """A micro-batch's part of the step's loss: FSDP2 averages gradients over ranks, so the sum over supervised
        tokens is multiplied by their number. The routers' auxiliary loss is a mean over micro-batches and ranks,
        whatever their tokens."""
        loss = output.loss * self.processes.world_size / tokens
        if output.aux_loss is not None:
            loss = loss + self.loss.router_coefficient * output.aux_loss / micro_batches
        return loss

    # What a step is made of.

    def _next(self, steps: Any) -> list[Batch] | None:
        self.watchdog.enter(BATCH, self.state.global_step + 1)
        if self.state.global_step >= self.state.max_steps:  # resumed between its last step and `final/`
            self.control.should_training_stop = True
            return None
        began = time.perf_counter()
        batches: list[Batch] | None = next(steps, None)
        self.data_seconds += time.perf_counter() - began
        return batches

    def _supervised_over_ranks(self, batches: list[Batch]) -> int | torch.Tensor:
        """On a GPU a number of the device, which the host does not wait for."""
        counted, device = supervised_tokens(batches), self.processes.device
        if self.processes.world_size == 1:
            return counted
        total = torch.tensor(counted, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        dist.all_reduce(total)
        return total

    def _sync_once_pays(self) -> bool:
        """Whether gradients are reduced at a step's last micro-batch only: until then each rank holds whole gradients
        of the adapters instead of its shard. Not with offloaded parameters, whose shards are on the host."""
        several = self.processes.world_size > 1 and self.config.train.gradient_accumulation_steps > 1
        return several and not offloads_params(self.config.parallel, self.processes.device)

    def _sync_gradients(self, *, last: bool) -> None:
        if self.syncs_once:
            for unit in self.units:
                unit.set_requires_gradient_sync(last, recurse=False)

    def _offloading(self) -> Any:
        device = self.processes.device
        if not self.config.train.offload_activations or not has_device_memory(device):
            return nullcontext()
        return OffloadedInputs(self.model.config.get_text_config().hidden_size, device)

    def _clear_gradients(self) -> None:
        """`model.zero_grad()` goes through all modules; a model of 32 layers with seven adapters each has 2,665."""
        for parameter in self.trained:
            parameter.grad = None
        every = self.config.train.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and self.processes.device.type == "cuda":
            torch.cuda.empty_cache()

    def _epoch_after(self, step: int) -> float:
        """Epochs done; within one, by micro-batches."""
        whole, steps = divmod(step, self.math.steps_per_epoch)
        return whole + steps * self.math.accumulation / len(self.batches.order)

    def _warn_of_short_grace(self, step: int, seconds: float) -> None:
        if step > 1:  # the first one compiles, and is over before anybody is likely to be preempted
            self.grace.step = max(self.grace.step, seconds)
        self.grace.save = self.saver.longest
        if text := self.grace.warning():
            warn(self.training.context.console, self.training.context.events, "grace", text)

    def _agree_on_requests(self) -> None:
        """What any rank was asked for, or a callback there decided, all ranks do, in the same step."""
        control = self.control
        if self.state.global_step >= self.state.max_steps:
            control.should_log = True  # the last step is always logged, whatever logging_steps divides
        mine = [
            self.training.stop.requested,
            control.should_log,
            control.should_evaluate,
            control.should_save or self.saver.is_overdue(),
            control.should_training_stop,
            control.should_epoch_stop,
        ]
        asked, control.should_log, control.should_evaluate, save, stop, control.should_epoch_stop = (
            self.processes.agree_each(mine)
        )
        self.stopped = self.stopped or asked
        control.should_training_stop = stop or asked
        control.should_save = save or asked

    # Between two steps.

    def _log_evaluate_save(self) -> None:
        control = self.control
        if control.should_log or control.should_evaluate or control.should_save or control.should_training_stop:
            self.guards.settle()  # nothing is shown or kept of a step that was not judged
        if control.should_log and self.metrics.steps:
            self._log()
        if control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self.save()

    def _log(self) -> None:
        """Loss, gradient norm and learning rate; entropy and accuracy of the predictions since the last line."""
        logs = self.metrics.line(router_loss=bool(self.loss.router_coefficient))
        if self.grad_norm is not None:  # None: of a step that was left out
            logs["grad_norm"] = float(self.grad_norm)
        logs["learning_rate"] = self.learning_rate
        self.state.num_input_tokens_seen = int(logs["num_tokens"])
        self._record(logs)
        self.progress.train_line(self.state, logs, paused=self.paused_seconds)

    def _record(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callbacks.on_log(self.args, self.state, self.control, logs)

    def evaluate(self) -> None:
        """The validation loss of this moment. One that is cut short because the run stops gives no result."""
        began, step = time.perf_counter(), self.state.global_step
        found: Validation | None = None
        with suppress(EvaluationStopped):
            found = validate(
                self.model, self.loss, eval_loader(self.training.setup.data, self.config.train, self.processes),
                self.processes, before_batch=self._before_eval_batch, stopped=self.stop_now,
            )  # fmt: skip
        seconds = time.perf_counter() - began
        self.paused_seconds += seconds
        self.ledger.enter(DATA)
        if found is None:
            self.control.should_training_stop = self.control.should_save = True
            return
        logs = {
            "eval_loss": found.loss, "eval_tokens": found.tokens, "eval_entropy": found.entropy,
            "eval_mean_token_accuracy": found.mean_token_accuracy, "eval_runtime": round(seconds, 4),
        }  # fmt: skip
        self._record(logs)
        self.progress.eval_line(self.state, logs)
        self.control = self.callbacks.on_evaluate(self.args, self.state, self.control, metrics=logs)
        self.guards.evaluated(step, found.loss)
        if self.early_stopping is not None and self.early_stopping.update(step, found.loss):
            self.control.should_training_stop = True
            say(self.training.context.console, "stopping", self.early_stopping.reason)
            self.training.context.events.write("notice", about="early_stopping", text=self.early_stopping.reason)

    def _before_eval_batch(self) -> None:
        self.watchdog.enter(EVALUATING, self.state.global_step)
        self.ledger.begin_evaluation_batch()
        self.control = self.callbacks.on_prediction_step(self.args, self.state, self.control)

    def eval_loss_at(self, step: int) -> float | None:
        """The validation loss measured at `step`, if it was."""
        found = (entry for entry in reversed(self.state.log_history) if entry["step"] == step and "eval_loss" in entry)
        return next((entry["eval_loss"] for entry in found), None)

    def save(self) -> None:
        began = time.perf_counter()
        self.watchdog.enter(SAVING, self.state.global_step)
        self.ledger.enter(SAVING_MEMORY)
        self.saver.save(self)
        self.ledger.enter(DATA)
        self.paused_seconds += time.perf_counter() - began
        self.control = self.callbacks.on_save(self.args, self.state, self.control)

    def stop_now(self) -> bool:
        """Asked between the batches of an evaluation and the tokens of a sample, by every rank."""
        self.stopped = self.stopped or self.processes.agree(self.training.stop.requested)
        return self.stopped

    # The beginning and the end.

    def _begin(self) -> None:
        """A fresh optimizer, schedule and state; or those of the checkpoint the run resumes from."""
        train, point = self.config.train, self.resumed
        step = point.step if point is not None else 0
        self._clear_gradients()
        self.optimizer = build_optimizer(self.model, train, self.processes.device)
        if point is not None:
            load_optimizer(self.model, self.optimizer, point.optimizer)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = train.learning_rate  # LambdaLR wants it where it does not begin at step 0
        factor = schedule_factor(train, self.math.steps, self.math.warmup_steps)
        self.scheduler = LambdaLR(self.optimizer, factor, last_epoch=step - 1)
        self.callbacks = callback_handler(
            self.training, self.profiler, self.optimizer, self.scheduler, self.batches.loader
        )
        self.profiler.is_attached = True
        self.state = TrainerState(
            max_steps=self.math.steps,
            num_train_epochs=math.ceil(self.math.epochs),
            train_batch_size=train.per_device_train_batch_size,
            is_local_process_zero=self.processes.local_rank == 0,
            is_world_process_zero=self.processes.is_main,
        )
        self.state.compute_steps(self.args, self.math.steps)
        self.metrics = Metrics(self.processes)
        self.control = TrainerControl()
        if point is not None:
            self._restore(point)
        self.model.train()
        self.ledger.begin(self.optimizer)
        self.guards.begin()
        self.proof.begin(self.model, step + 1)
        self.control = self.callbacks.on_train_begin(self.args, self.state, self.control)
        self.progress.begin(self.state, tokens=point.tokens if point is not None else 0, paused=self.paused_seconds)
        if (point is None and train.eval_on_start) or (point is not None and self._missed_evaluation()):
            self.evaluate()
            if point is not None and (loss := self.eval_loss_at(step)) is not None:
                self.saver.record_eval(step, loss)  # it counts for that checkpoint, which may be the best one
        self._seed(point)

    def _restore(self, point: ResumePoint) -> None:
        saved, state = point.trainer, self.state
        state.global_step, state.epoch = saved["step"], saved["epoch"]
        state.log_history = list(saved["log_history"])
        self.metrics.restore(saved["metrics"])
        if saved.get("guards"):
            self.guards.restore(saved["guards"])
        if self.early_stopping is not None and saved.get("early_stopping"):
            self.early_stopping.restore(saved["early_stopping"])
        restore_callbacks(self.callbacks.callbacks, saved.get("callbacks", {}))

    def _missed_evaluation(self) -> bool:
        """A stop cuts the evaluation short that belongs to the step of the checkpoint."""
        step, how = self.state.global_step, self.config.train.eval_strategy
        due = (how == "epoch" and step % self.math.steps_per_epoch == 0) or (
            how == "steps" and step % self.config.train.eval_steps == 0
        )
        return due and self.config.train.eval_delay <= step and self.eval_loss_at(step) is None

    def _seed(self, point: ResumePoint | None) -> None:
        """Dropout: each rank its own numbers, and after a resume those that come next."""
        seed = self.config.train.seed + self.processes.rank
        if point is None:
            torch.manual_seed(seed)
        elif point.rng is not None:
            load_rng(point.rng, self.processes.device)
        else:  # other ranks than before: numbers that were not drawn yet
            torch.manual_seed(seed + 1_000_003 * point.step)

    def _end(self) -> None:
        self.proof.end(self.state.global_step)
        self.control = self.callbacks.on_train_end(self.args, self.state, self.control)
        self.watchdog.enter(ENDING)
