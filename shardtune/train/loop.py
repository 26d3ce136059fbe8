"""Who takes the steps, and who watches them? TRL's trainer with everything that hangs on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PrinterCallback

from shardtune.observe.profiler import LLMStepProfiler
from shardtune.observe.progress import ProgressCallback
from shardtune.parallel.offload import OffloadedInputs, has_another_place
from shardtune.run.stop_request import Grace, StopRequest, grace_seconds
from shardtune.train.guards.alarm import RollBack
from shardtune.train.guards.health import HealthChecks
from shardtune.train.guards.machine import gpu_of
from shardtune.train.guards.rollback import go_back
from shardtune.train.guards.watch import Guards
from shardtune.train.proof import ProofOfTraining
from shardtune.train.run_files import let_trackers_fail
from shardtune.train.saving import CheckpointSaver, RunFacts, SaveWatch
from shardtune.train.settings import trainer_settings
from shardtune.train.step_watch import GraceWatch, ProgressWatch
from shardtune.train.trainer import ShardedSFTTrainer, StopAtStep

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from shardtune.config.schema import RunConfig
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.context import Data, RunContext
    from shardtune.train.memory.ledger import Ledger
    from shardtune.train.resume import ResumePoint
    from shardtune.train.watchdog import Watchdog


@dataclass(frozen=True)
class Loop:
    """A trainer that is ready to begin."""

    context: RunContext
    trainer: ShardedSFTTrainer
    guards: Guards
    progress: ProgressCallback
    profiler: LLMStepProfiler
    stopping: StopAtStep
    facts: RunFacts
    math: TrainingMath

    def train(self) -> None:
        """All steps; whatever ends them, nothing is left open behind them."""
        try:
            self._take_steps()
        finally:
            self.progress.close()
            self.profiler.close()
            self.trainer.saver.finish()

    @property
    def was_stopped(self) -> bool:
        """On request, before the last step."""
        return self.stopping.stopped and self.trainer.state.global_step < self.math.steps

    def _take_steps(self) -> None:
        """TRL's loop, and again from an older checkpoint as often as a guard asks for it."""
        while True:
            try:
                self.trainer.train()
            except RollBack as back:
                alarm = back.alarm
            else:
                return
            # Outside of the handler: the exception would keep the frames of the loop, and all that lives in them.
            self.progress.close()
            point = go_back(alarm, self.guards, self.trainer, self.context.processes, self.facts, self.math)
            self.progress.tokens_before = point.tokens


def set_up_loop(
    context: RunContext,
    config: RunConfig,
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    math: TrainingMath,
    facts: RunFacts,
    saver: CheckpointSaver,
    resumed: ResumePoint | None,
    stop: StopRequest,
    watchdog: Watchdog,
    ledger: Ledger,
) -> Loop:
    """The trainer for a model that is sharded and filled, with its callbacks in the order they are asked in."""
    processes, console, events = context.processes, context.console, context.events
    stopping = StopAtStep(stop, processes)
    looks = HealthChecks(config.guards, processes, gpu_of(processes.device), config.train.debug_freq)
    guards = Guards(config.guards, console, events, processes, looks)
    progress = ProgressCallback(console, events)
    profiler = LLMStepProfiler(config.train.debug_freq, config.data.max_length, console=console, events=events)
    grace = Grace(grace_seconds(config.train.grace_seconds, os.environ))
    trainer = ShardedSFTTrainer(
        model=model,
        args=trainer_settings(config, context.folder, math, on_cpu=processes.device.type == "cpu"),
        train_rows=data.train,
        eval_rows=data.val,
        collator=data.collator,
        tokenizer=tokenizer,
        processes=processes,
        saver=saver,
        resumed=resumed,
        callbacks=[
            ledger,
            guards,  # before the proof, which must know what they leave out
            progress,
            profiler,
            ProofOfTraining(console, events, processes, lambda: guards.left_out),
            SaveWatch(saver, config.train.save_minutes),
            GraceWatch(grace, lambda: saver.longest, console, events),
            stopping,
            ProgressWatch(watchdog),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    let_trackers_fail(context, trainer.callback_handler.callbacks)
    trainer.ledger, trainer.loss = ledger, data.loss
    if config.train.offload_activations and has_another_place(processes.device):
        width = model.config.get_text_config().hidden_size
        trainer.maybe_activation_offload_context = OffloadedInputs(width, processes.device)  # TRL enters it
    guards.attach(trainer)
    profiler.attach(trainer)
    progress.paused = lambda: trainer.paused_seconds
    trainer.stop_evaluating = stopping.now
    if resumed is not None:
        progress.tokens_before = resumed.tokens
    return Loop(context, trainer, guards, progress, profiler, stopping, facts, math)
