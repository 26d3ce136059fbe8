"""The training loop. One optimizer step, from batch to checkpoint, is `TrainingLoop.train_step`: read it first."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl, TrainerState
from transformers.integrations.neftune import activate_neftune

from shardtune.checkpoint.optimizer import load_optimizer
from shardtune.data.collate import REAL_TOKENS
from shardtune.errors import UserInputError
from shardtune.observe.profile_window import ProfileWindow
from shardtune.observe.profiler import LLMStepProfiler
from shardtune.observe.progress import ProgressLines
from shardtune.parallel.offload import offload_context
from shardtune.parallel.shard import GradientSync
from shardtune.plan.schedule import schedule_factor
from shardtune.run.stop_request import Grace, known_grace
from shardtune.run.watchdog import BATCH, ENDING, EVALUATING, SAVING, STEP
from shardtune.terminal import say, warn
from shardtune.train.batches import (
    Batch,
    TrainBatches,
    eval_loader,
    supervised_over_ranks,
    supervised_tokens,
    to_device,
)
from shardtune.train.callbacks import callback_handler, training_arguments
from shardtune.train.early_stopping import EarlyStopping
from shardtune.train.guards.alarm import Alarm, RollBack
from shardtune.train.guards.health import HealthChecks
from shardtune.train.guards.machine import gpu_of
from shardtune.train.guards.numbers import HostNumber
from shardtune.train.guards.rollback import roll_back
from shardtune.train.guards.watch import Guards
from shardtune.train.memory import ledger as memory
from shardtune.train.metrics import Metrics, StepTotals
from shardtune.train.optimizers import build_optimizer
from shardtune.train.proof import ProofOfTraining
from shardtune.train.replicas import ReplicaCheck
from shardtune.train.resume import missed_evaluation, restore_loop, seed_rank
from shardtune.train.shards import clip_gradients
from shardtune.train.validation import EvaluationStopped, Validation, validate

if TYPE_CHECKING:
    from shardtune.train.context import Training
    from shardtune.train.losses import LossOutput
    from shardtune.train.resume import ResumePoint


class TrainingLoop:
    """Trains a model that is adapted, sharded and loaded, from the first step or from a checkpoint to the last one.

    What hangs on a step, each called by name in `train_step`: the watchdog (does this rank make progress?), the memory
    ledger (what is allocated in which phase?), guards (is a number wrong?), the proof (does what should train?),
    replicas (do they hold the same?), callbacks (the profiler, trackers, the user's own), progress lines, checkpoints,
    requests to stop.

    Attributes:
        state, control: As transformers' callbacks know them.
        stopped: The run was asked to stop, and every rank knows.
        paused_seconds: Spent evaluating and saving, which throughput does not count.
        data_seconds: Spent waiting for batches.
        profiles: Of the last steps.
    """

    def __init__(self, training: Training, resumed: ResumePoint | None) -> None:
        setup, context = training.setup, training.context
        self.training, self.resumed = training, resumed
        self.config, self.model, self.loss, self.math = setup.config, setup.model, setup.loss, setup.math
        self.processes, self.console, self.events = context.processes, context.console, context.events
        self.saver, self.watchdog, self.ledger = training.saver, training.watchdog, training.ledger
        train, device = self.config.train, self.processes.device
        self.stopped = False
        self.paused_seconds = self.data_seconds = 0.0
        self.grad_norm: torch.Tensor | None = None  # of the last step over all ranks, before clipping
        self.learning_rate = 0.0  # of the last step
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.batches = TrainBatches(setup.data, train, self.processes)
        self.gradient_sync = GradientSync(self.model, self.config.parallel, setup.sharding.mesh, train.accumulation)
        self.offload_activations = offload_context(self.model, device, enabled=train.offload_activations is True)
        health = HealthChecks(self.config.guards, self.processes, gpu_of(device), train.debug_freq)
        self.guards = Guards(self.config.guards, self.console, self.events, self.processes, health)
        self.guards.attach(self)
        self.proof = ProofOfTraining(self.console, self.events, self.processes)
        self.replicas = ReplicaCheck(setup, self.processes, self.events)
        self.progress = ProgressLines(self.console, self.events)
        self.profiler = LLMStepProfiler(
            train.debug_freq, self.config.data.max_length, console=self.console, events=self.events
        )
        self.profiler.recomputes_layers = train.gradient_checkpointing is True
        self.profiler.nodes = self.processes.nodes
        self.profiles = ProfileWindow()
        self.profiler.listeners.append(self.profiles.add)
        self.early_stopping: EarlyStopping | None = None
        if train.early_stopping_patience is not None:
            self.early_stopping = EarlyStopping(train.early_stopping_patience, train.early_stopping_threshold)
        self.grace = Grace(known_grace(train.grace_seconds, os.environ))
        self.args = training_arguments(self.config, context.folder, self.math, on_cpu=device.type == "cpu")
        self.callbacks = callback_handler(training, self.profiler, self.batches.loader)
        self.state, self.control = self._new_state(), TrainerControl()
        self._call("on_init_end")
        if train.gradient_checkpointing is True:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if train.neftune_noise_alpha is not None:
            activate_neftune(self.model, train.neftune_noise_alpha)

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
            self._run_epochs()
        except RollBack as back:
            return back.alarm
        return None

    def _run_epochs(self) -> None:
        self._begin()
        first, done = divmod(self.state.global_step, self.math.steps_per_epoch)
        for epoch in range(first, math.ceil(self.math.steps / self.math.steps_per_epoch)):
            self._call("on_epoch_begin")
            steps, before, done = self.batches.epoch(epoch, done), self.state.global_step, 0
            while (batches := self._next(steps)) is not None:
                self.train_step(batches)
                if self.control.should_training_stop:
                    break
            if self.state.global_step > before and not self.stopped:
                self._call("on_epoch_end")
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
        self._end()

    def train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over this rank's micro-batches. Whatever happens in a step, happens here in this order."""
        began, step = time.monotonic(), self.state.global_step + 1
        self.watchdog.enter(STEP, step)
        tokens = supervised_over_ranks(batches, self.processes)
        self.ledger.begin_step(step)
        self.guards.begin_step(step)  # leaves out a step that was rolled back
        self._call("on_step_begin")

        losses: list[HostNumber] = []
        totals = StepTotals.zero(self.processes.device)
        for number, batch in enumerate([] if self.guards.left_out else batches):
            if number:
                self.watchdog.beat()
                self.ledger.begin_micro_batch()
                self._call("on_substep_end")
            self.gradient_sync.before_micro_batch(last=number == len(batches) - 1)
            real, supervised = batch.pop(REAL_TOKENS), supervised_tokens([batch])
            with self.offload_activations:
                output = self.loss(self.model, to_device(batch, self.processes.device))
                loss = self.normalise(output, tokens, len(batches))
                losses.append(HostNumber(loss))
                self.ledger.enter(memory.BACKWARD)
                loss.backward()
            totals.add_micro_batch(output.token_stats, output.aux_loss, supervised, real)

        norm = None if self.guards.left_out else clip_gradients(self.trained, self.config.train.max_grad_norm)
        self.ledger.enter(memory.OPTIMIZER)
        self._call("on_pre_optimizer_step")
        step_loss = self.guards.judge(step, losses, norm)  # may roll back, end the run, or leave the step out
        if self.guards.left_out:
            self._clear_gradients()
            self.optimizer.step()  # without gradients it changes nothing
        else:
            self.proof.before_optimizer(step)
            self.optimizer.step()
            self.proof.after_optimizer(step, self.optimizer)
            self.metrics.add_step(step_loss, totals)
        self._call("on_optimizer_step")
        self.grad_norm = None if self.guards.left_out else norm
        self.learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self._clear_gradients()

        self.state.global_step, self.state.epoch = step, self._epoch_after(step)
        self.ledger.enter(memory.DATA)
        self.replicas.end_step(step)
        self.guards.end_step(step, moving=not self.guards.left_out and self.learning_rate > 0)
        self.progress.end_step(self.state)
        self._check_grace_period(step, time.monotonic() - began)
        self.saver.poll()
        self._call("on_step_end")
        self._agree_on_requests()
        self._log_evaluate_save()

    def normalise(self, output: LossOutput, tokens: int | torch.Tensor, micro_batches: int) -> torch.Tensor:
        """A micro-batch's part of the step's loss, per supervised token of the whole step: FSDP2 averages gradients
        over ranks, hence `world_size`. The routers' loss is a mean over micro-batches and ranks, whatever their tokens.
        """
        loss = output.loss * self.processes.world_size / tokens
        if output.aux_loss is not None:
            loss = loss + self.loss.router_coefficient * output.aux_loss / micro_batches
        return loss

    def _next(self, steps: Iterator[list[Batch]]) -> list[Batch] | None:
        self.watchdog.enter(BATCH, self.state.global_step + 1)
        if self.state.global_step >= self.math.steps:  # resumed between its last step and `final/`
            self.control.should_training_stop = True
        if self.control.should_training_stop:
            return None
        began = time.perf_counter()
        batches = next(steps, None)
        self.data_seconds += time.perf_counter() - began
        return batches

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

    def _check_grace_period(self, step: int, seconds: float) -> None:
        # The first step compiles, and is over before anybody is likely to be preempted.
        if text := self.grace.check(seconds if step > 1 else 0.0, self.saver.longest):
            warn(self.console, self.events, "grace", text)

    def _agree_on_requests(self) -> None:
        """What any rank was asked for, or a callback there decided, all ranks do, in the same step."""
        control = self.control
        if self.state.global_step >= self.math.steps:
            control.should_log = True  # the last step is always logged, whatever logging_steps divides
        mine = [
            self.training.stop.requested, control.should_log, control.should_evaluate,
            control.should_save or self.saver.is_overdue(), control.should_training_stop, control.should_epoch_stop,
        ]  # fmt: skip
        asked, log, evaluate, save, stop, end_epoch = self.processes.agree_each(mine)
        if end_epoch:
            raise UserInputError(
                f"A callback asked to end the epoch at step {self.state.global_step} (control.should_epoch_stop).",
                why="The position in the data follows from the step number, so that a run resumes exactly.",
                fix="Use control.should_training_stop in the callback, or train.max_steps.",
            )
        self.stopped = self.stopped or asked
        control.should_log, control.should_evaluate = log, evaluate
        control.should_save, control.should_training_stop = save or asked, stop or asked

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
        self._call("on_log", logs=logs)

    def evaluate(self) -> None:
        """The validation loss now. An evaluation that is cut short because the run stops gives no result."""
        began, step = time.perf_counter(), self.state.global_step
        found: Validation | None = None
        with suppress(EvaluationStopped):
            found = validate(
                self.model, self.loss, eval_loader(self.training.setup.data, self.config.train, self.processes),
                self.processes, before_batch=self._before_eval_batch, stopped=self.stop_now,
            )  # fmt: skip
        seconds = time.perf_counter() - began
        self.paused_seconds += seconds
        self.ledger.enter(memory.DATA)
        if found is None:
            self.control.should_training_stop = self.control.should_save = True
            return
        logs = {
            "eval_loss": found.loss, "eval_tokens": found.tokens, "eval_entropy": found.entropy,
            "eval_mean_token_accuracy": found.mean_token_accuracy, "eval_runtime": round(seconds, 4),
        }  # fmt: skip
        self._record(logs)
        self.progress.eval_line(self.state, logs, found.groups)
        self._call("on_evaluate", metrics=logs)
        self.guards.evaluated(step, found.loss)
        if self.state.best_metric is None or found.loss < self.state.best_metric:
            self.state.best_metric, self.state.best_global_step = found.loss, step
        if self.early_stopping is not None and self.early_stopping.update(step, found.loss):
            self.control.should_training_stop = True
            say(self.console, "stopping", f"early stopping: {self.early_stopping.reason}")
            self.events.write("notice", about="early_stopping", text=self.early_stopping.reason)

    def _before_eval_batch(self) -> None:
        self.watchdog.enter(EVALUATING, self.state.global_step)
        self.ledger.begin_evaluation_batch()
        self._call("on_prediction_step")

    def eval_loss_at(self, step: int) -> float | None:
        """The validation loss measured at `step`, if it was."""
        found = (entry for entry in reversed(self.state.log_history) if entry["step"] == step and "eval_loss" in entry)
        return next((entry["eval_loss"] for entry in found), None)

    def save(self) -> None:
        began = time.perf_counter()
        self.watchdog.enter(SAVING, self.state.global_step)
        self.ledger.enter(memory.SAVING)
        self.saver.save(self)
        self.ledger.enter(memory.DATA)
        self.paused_seconds += time.perf_counter() - began
        self._call("on_save")

    def stop_now(self) -> bool:
        """Asked between the batches of an evaluation and the tokens of a sample, by every rank."""
        self.stopped = self.stopped or self.processes.agree(self.training.stop.requested)
        return self.stopped

    def _begin(self) -> None:
        """A fresh optimizer, schedule and state; or those of the checkpoint the run resumes from."""
        train, point = self.config.train, self.resumed
        step = point.step if point is not None else 0
        self.optimizer = build_optimizer(self.model, train, self.processes.device)
        if point is not None:
            load_optimizer(self.model, self.optimizer, point.optimizer)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = train.learning_rate  # LambdaLR needs it where it does not begin at step 0
        factor = schedule_factor(train, self.math.steps, self.math.warmup_steps)
        self.scheduler = LambdaLR(self.optimizer, factor, last_epoch=step - 1)
        self.callbacks.optimizer, self.callbacks.lr_scheduler = self.optimizer, self.scheduler
        self.state, self.control = self._new_state(), TrainerControl()
        self.metrics = Metrics(self.processes)
        if point is not None:
            restore_loop(self, point)
        self._clear_gradients()
        self.model.train()
        self.ledger.begin(self.optimizer)
        self.guards.begin()
        self.proof.begin(self.model, step + 1)
        self.replicas.begin(self.proof.frozen, step)
        self._call("on_train_begin")
        self.progress.begin(self.state, tokens=point.tokens if point is not None else 0, paused=self.paused_seconds)
        if train.eval_on_start if point is None else missed_evaluation(self):
            self.evaluate()
            if point is not None and (loss := self.eval_loss_at(step)) is not None:
                self.saver.record_eval(step, loss)  # it counts for that checkpoint, which may be the best one
        elif self.early_stopping is not None and self.early_stopping.should_stop:
            self.control.should_training_stop = True  # the run was interrupted before it published its weights
        seed_rank(self, point)

    def _new_state(self) -> TrainerState:
        state = TrainerState(
            max_steps=self.math.steps,
            num_train_epochs=math.ceil(self.math.epochs),
            train_batch_size=self.config.train.micro_batch,
            is_local_process_zero=self.processes.local_rank == 0,
            is_world_process_zero=self.processes.is_main,
        )
        state.compute_steps(self.args, self.math.steps)
        return state

    def _end(self) -> None:
        step, early = self.state.global_step, self.early_stopping is not None and self.early_stopping.should_stop
        if step < self.math.steps and not self.stopped and not early:
            text = f"a callback (train.callbacks) ended training after step {step} of {self.math.steps}"
            say(self.console, "stopping", text)
            self.events.write("notice", about="callbacks", text=text)
        if self.metrics.steps and not self.stopped:
            self._log()  # what early stopping or a callback ended between two log lines
        self.proof.end(self.state.global_step)
        self._call("on_train_end")
        self.watchdog.enter(ENDING)

    def _call(self, event: str, **given: Any) -> None:
        """The profiler, trackers and the user's callbacks, in this order."""
        self.control = getattr(self.callbacks, event)(self.args, self.state, self.control, **given)
