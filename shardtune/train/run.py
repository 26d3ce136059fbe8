"""The run itself: join → set up (facts, choices, model, data, shards) → weights → train or evaluate → save."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from shardtune import terminal
from shardtune.checkpoint.changes import identity, kept_settings
from shardtune.checkpoint.final import FinalSource
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.observe.progress_bar import LoadingProgress
from shardtune.parallel.offload import offloads_params
from shardtune.parallel.processes import join
from shardtune.run.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from shardtune.run.folder import CHECKPOINTS
from shardtune.run.stop_request import StopRequest
from shardtune.run.watchdog import ENDING, JOINING, PREPARING, Limits, Watchdog
from shardtune.train import summary
from shardtune.train.account import (
    introduce,
    log_resume,
    record_base_model,
    record_success,
    report_end,
    report_event_log_error,
    take_over,
)
from shardtune.train.best import load_best
from shardtune.train.callbacks import check_callbacks
from shardtune.train.context import RunContext, Training, open_run, refuse_different_nodes
from shardtune.train.evaluation import evaluate_only, temporary_run
from shardtune.train.final import write_final
from shardtune.train.loop import TrainingLoop
from shardtune.train.memory.allocator import allocator_of
from shardtune.train.memory.failure import MemoryAnswer
from shardtune.train.memory.ledger import Ledger
from shardtune.train.resume import resume_point
from shardtune.train.samples import Samples
from shardtune.train.saving import CheckpointSaver, RunFacts
from shardtune.train.setup import Setup, set_up
from shardtune.train.weights import load_sharded_weights

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.observe.events import EventLog
    from shardtune.run.evaluation import Evaluation


def train(
    given: ResolvedConfig,
    *,
    run_id: str | None = None,
    stop: StopRequest | None = None,
    evaluation: Evaluation | None = None,
) -> int:
    """Train what the config describes, as one rank of the run; returns the exit code (0, or that of a stopped run).

    With an `evaluation`, everything is brought to where the first step would be taken, and evaluated instead.
    Sharding comes before weights, so that no rank ever holds more than its part.
    """
    check_callbacks(given.config.train)
    stop = stop or StopRequest()
    with _watched(given.config) as watchdog, join(given.config.parallel) as processes, ExitStack() as at_end:
        asked = given.on_device(processes.device.type)
        if evaluation is None:
            context = open_run(asked.config, processes, run_id, at_end)
        else:
            context = temporary_run(asked.config, processes, evaluation, at_end)
        context.events.notify = partial(report_event_log_error, context)
        at_end.callback(context.events.finish)
        at_end.push(partial(_log_failure, context.events))
        refuse_different_nodes(processes, asked.config)
        watchdog.write_to(context.folder, context.events)
        watchdog.enter(PREPARING)
        introduce(context, asked)
        setup = set_up(context, asked, watchdog, evaluation)
        memory = at_end.enter_context(_memory_answer(context, setup.config))
        memory.ledger.watch(setup.model)
        _load_weights(context, setup, watchdog)
        stop.wait_for_step()
        if evaluation is not None:
            return evaluate_only(context, setup, stop, watchdog, as_json=evaluation.as_json)
        code = _train_and_save(Training(context, setup, _saver(context, setup), stop, watchdog, memory.ledger))
        if code == 0:
            record_success(context)
        return code


def _log_failure(events: EventLog, kind: object, error: BaseException | None, trace: object) -> None:
    """The last event of a run that failed, where this process can still write it; a refused start is not its end."""
    if isinstance(error, Exception) and not (events.deferred and isinstance(error, UserInputError)):
        events.release()
        code = error.exit_code if isinstance(error, ShardtuneError) else FAILED
        text = error.what if isinstance(error, ShardtuneError) else repr(error)
        events.write("run_failed", exit_code=code, text=text)


def _memory_answer(context: RunContext, config: RunConfig) -> MemoryAnswer:
    device = context.processes.device
    return MemoryAnswer(Ledger(allocator_of(device), device), context.events, context.processes, config)


def _watched(config: RunConfig) -> Watchdog:
    watchdog = Watchdog(int(os.environ.get("RANK", "0")), Limits.of(config.parallel))
    watchdog.enter(JOINING)
    return watchdog


def _run_facts(context: RunContext, setup: Setup) -> RunFacts:
    config, math = setup.config, setup.math
    return RunFacts(
        settings=kept_settings(config),
        identity=identity(config),
        asked={"identity": identity(context.asked), "settings": kept_settings(context.asked)},
        data=str(setup.prepared.about["fingerprint"]),
        batch={
            "per_device": math.per_device,
            "processes": math.processes,
            "accumulation": math.accumulation,
            "effective": math.effective_batch,
        },
        steps_per_epoch=math.steps_per_epoch,
    )


def _load_weights(context: RunContext, setup: Setup, watchdog: Watchdog) -> None:
    with LoadingProgress(context.console) as progress:

        def moved(done: int, total: int) -> None:
            watchdog.beat()
            progress(done, total)

        loaded = load_sharded_weights(
            setup.model,
            setup.meta_model,
            setup.strategy,
            context.processes,
            setup.sharding.mesh,
            setup.config.train.seed,
            moved,
            on_host=offloads_params(setup.config.parallel, context.processes.device),
            new_tokens=setup.built.new_tokens,
        )
    context.processes.wait_for_all("weights")
    context.events.write("weights", **asdict(loaded))
    read, *remarkable = summary.weights_lines(loaded, setup.meta_model)
    terminal.detail(context.console, "weights", read)
    for line in remarkable:
        terminal.say(context.console, "weights", line)


def _train_and_save(training: Training) -> int:
    """The loop, from the first step or from a checkpoint; then what is published."""
    context, setup, saver = training.context, training.setup, training.saver
    resumed = resume_point(saver.store, setup.model, context.processes, saver.facts, setup.math)
    loop = TrainingLoop(training, resumed)
    samples = Samples(training, stopped=loop.stop_now)
    if resumed is not None:
        take_over(context)
        log_resume(context, resumed, setup.math)
    else:
        samples.ask("before")
    record_base_model(context, setup)
    began = time.perf_counter()
    loop.run()
    step, train = loop.state.global_step, setup.config.train
    evaluates = train.eval_strategy != "no"
    if evaluates and not loop.stopped and loop.eval_loss_at(step) is None:
        loop.evaluate()
    if loop.stopped and (step < setup.math.steps or (evaluates and loop.eval_loss_at(step) is None)):
        return _end_early(loop)
    training.watchdog.enter(ENDING)
    best = None
    if train.load_best_model_at_end:
        best = load_best(context, setup.model, saver.store, step, loop.eval_loss_at(step))
    published = FinalSource(best.step, best.eval_loss) if best else FinalSource(step, loop.eval_loss_at(step))
    adapter = write_final(training, published)
    seconds = time.perf_counter() - began
    samples.ask("after")
    report_end(loop, seconds, best, adapter)
    samples.show()
    return 0


def _saver(context: RunContext, setup: Setup) -> CheckpointSaver:
    store = CheckpointStore(context.folder / CHECKPOINTS, setup.config.train.save_total_limit)
    return CheckpointSaver(store, context, _run_facts(context, setup), setup.config.train.save_minutes)


def _end_early(loop: TrainingLoop) -> int:
    """Stopped on request: the exit code."""
    context, step = loop.training.context, loop.state.global_step
    text = "Stopped on request before the first step."
    if step > 0:
        text = f"Stopped on request after step {step} of {loop.math.steps}. {_last_checkpoint(loop)}"
    context.events.write("run_end", status="stopped", step=step)
    context.console.print(text, highlight=False, markup=False, soft_wrap=True)
    # A rank that got no signal itself leaves like the others.
    interrupted = context.processes.agree(loop.training.stop.signal == signal.SIGINT)
    return INTERRUPTED if interrupted else PREEMPTED


def _last_checkpoint(loop: TrainingLoop) -> str:
    """Where the run can resume."""
    context, saver, step = loop.training.context, loop.saver, loop.state.global_step
    if loop.control.should_save:  # the last evaluation was cut short, after the loop's last chance to save
        loop.save()
        saver.finish()
    if context.processes.is_main and not saver.has(step):
        return "Its checkpoint could not be written; the previous one is good."
    again = "The same command resumes from there. " if context.asked.train.resume != "never" else ""
    return f"{again}Checkpoint: {saver.store.path(step)}"
