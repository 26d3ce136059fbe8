"""The run itself, from top to bottom: join → model → adapters → data → shard → weights → train → save."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from transformers import set_seed

from shardtune import terminal
from shardtune.adapters.lora import add_lora
from shardtune.checkpoint.changes import identity, kept_settings
from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import ResolvedConfig
from shardtune.config.references import put_back
from shardtune.data.checks import ModelLimits, enforce, model_positions, refusals_and_warnings
from shardtune.data.collate import Collator
from shardtune.data.order import Documents
from shardtune.data.prepare import PreparedSet, prepare
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.load import tokenizer_and_new_tokens
from shardtune.model.meta_model import build_meta_model
from shardtune.model.new_tokens import resize_embeddings
from shardtune.model.quantized import enable_fp8_compute, use_fp8_storage
from shardtune.observe.preparing import PreparingProgress
from shardtune.observe.progress_bar import LoadingProgress
from shardtune.parallel.offload import offloads_params
from shardtune.parallel.processes import join
from shardtune.parallel.shard import shard_model
from shardtune.plan.steps import TrainingMath, training_math
from shardtune.run.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from shardtune.run.folder import CHECKPOINTS
from shardtune.run.stop_request import StopRequest
from shardtune.train import summary
from shardtune.train.account import (
    introduce,
    take_over,
    tell_end,
    tell_event_log_trouble,
    tell_finish,
    tell_loss,
    tell_notices,
    tell_plan,
    tell_resume,
    warn_of_random_weights,
    write_config,
)
from shardtune.train.attention import FLAT_ATTENTION, NEARLY_FULL, resolve_packing
from shardtune.train.best import load_best
from shardtune.train.callbacks import check_callbacks
from shardtune.train.choices import (
    fp8_blocks,
    fp8_compute_notice,
    fuse,
    resolve_autos,
    resolve_dtype,
    resolve_kernels,
    resolve_layer_class,
    resolve_precision,
    slow_precision_notice,
)
from shardtune.train.context import Data, RunContext, Training, open_run, refuse_different_data, refuse_different_nodes
from shardtune.train.evaluation import evaluate_only, read_given, temporary_run
from shardtune.train.final import write_final
from shardtune.train.loop import TrainingLoop
from shardtune.train.losses import build_loss
from shardtune.train.losses.router import unused_notice
from shardtune.train.memory.allocator import allocator_of
from shardtune.train.memory.failure import MemoryAnswer
from shardtune.train.memory.ledger import Ledger
from shardtune.train.resume import resume_point
from shardtune.train.samples import Samples
from shardtune.train.saving import CheckpointSaver, RunFacts
from shardtune.train.watchdog import ENDING, JOINING, LOADING, PREPARING, Limits, Watchdog
from shardtune.train.weights import find_checkpoint, load_sharded_weights

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shardtune.config.schema import RunConfig
    from shardtune.data.prepared import Prepared
    from shardtune.model.families.family import Wrapper
    from shardtune.model.meta_model import MetaModel
    from shardtune.model.new_tokens import NewTokens
    from shardtune.observe.events import EventLog
    from shardtune.run.evaluation import Evaluation
    from shardtune.train.weights import LoadStrategy


def train(
    resolved: ResolvedConfig,
    *,
    run_id: str | None = None,
    stop: StopRequest | None = None,
    evaluation: Evaluation | None = None,
) -> int:
    """Train what the config describes, as one rank of the run; returns the exit code (0, or that of a stopped run).

    With an `evaluation`, everything is brought to where the first step would be taken, and evaluated instead.

    The order is the whole story: what needs neither weights nor rows comes first (a target that matches nothing is told
    in seconds), data before weights, adapters before sharding (so that they are sharded too), sharding before weights
    (so that no rank ever holds more than its part), all of it before the trainer.
    """
    check_callbacks(resolved.config.train)
    stop, asked = stop or StopRequest(), resolved.config
    with (
        _watched(resolved.config) as watchdog,
        join(resolved.config.parallel) as processes,
        ExitStack() as at_end,
    ):
        resolved = resolve_autos(
            resolved,
            device=processes.device.type,
            processes_here=int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size)),
        )
        config = resolved.config
        context = (
            open_run(asked, processes, run_id, at_end)
            if evaluation is None
            else temporary_run(asked, processes, evaluation, at_end)
        )
        context.events.notify = partial(tell_event_log_trouble, context)
        at_end.callback(context.events.finish)
        at_end.push(partial(_tell_failure, context.events))
        memory = at_end.enter_context(_memory_answer(context, config))
        refuse_different_nodes(processes, asked)
        watchdog.write_to(context.folder, context.events)
        watchdog.enter(PREPARING)
        introduce(context, resolved)
        if config.model.weights == "random":
            warn_of_random_weights(context)
        checkpoint = find_checkpoint(config.model, processes)
        meta_model = build_meta_model(config.model, checkpoint.folder, checkpoint.stored)
        resolved = resolve_dtype(resolved, meta_model)
        if slow := slow_precision_notice(resolved.config.model.torch_dtype, processes.device.type):
            tell_notices(context, [slow], about="config")
        resolved = resolve_precision(resolved, meta_model, processes)
        if resolved.config.model.base_precision == "fp8":
            use_fp8_storage(meta_model.model, fp8_blocks(meta_model))
        tokenizer, new_tokens = _tokenizer(context, config, checkpoint.folder, meta_model.model)
        ids = new_tokens.ids if new_tokens is not None else ()
        model, coverage, notices = add_lora(meta_model.model, config.lora, meta_model.family, ids)
        wanted = evaluation.adapter if evaluation is not None else None
        given = read_given(processes, model, config.model.model_name_or_path, wanted) if wanted is not None else None
        if given is not None:
            tell_notices(context, given.notices, about="adapter")
        resolved, layer_notices = resolve_layer_class(resolved, meta_model)
        tell_notices(context, layer_notices, about="sharding")
        resolved = resolve_kernels(resolved, meta_model.model, meta_model.family, processes.device)
        if resolved.config.train.fp8_compute:
            tell_notices(
                context, [fp8_compute_notice(*enable_fp8_compute(model), processes.device)], about="fp8_compute"
            )
        fused = fuse(model, resolved.config.train)
        loss = build_loss(resolved.config.train, meta_model.model, meta_model.family)
        tell_loss(context, loss)
        if unused := unused_notice(meta_model.model):
            tell_notices(context, [unused], about="loss")
        tell_notices(context, notices)
        prepared = _prepare_data(context, config, tokenizer)
        watchdog.enter(LOADING)
        if evaluation is not None:
            prepared = replace(prepared, overlap=0)  # whoever evaluates on training rows means it
        _check_data(context, meta_model.model, tokenizer, prepared, new_tokens)
        filled = prepared.train.counts.tokens / (prepared.train.counts.rows * config.data.max_length)
        resolved = resolve_packing(resolved, meta_model.model, meta_model.family, processes.device, filled)
        config = resolved.config
        data = replace(_lay_out(config, prepared, meta_model.model, tokenizer, filled), loss=loss)
        math = training_math(config.train, rows=len(data.train), tokens=data.tokens, processes=processes.world_size)
        write_config(context, resolved)
        set_seed(config.train.seed)
        compute_dtype = torch.bfloat16 if config.train.bf16 else None
        sharding = shard_model(
            model,
            config.parallel,
            processes.mesh,
            compute_dtype,
            meta_model.layer_class,
            selective=config.train.gradient_checkpointing == "selective",
            compiled=config.train.compile is True,
        )
        if evaluation is None:
            tell_plan(context, resolved, prepared, data, math, coverage, sharding, fused)
        memory.config = config
        memory.ledger.watch(model)
        _load_weights(context, config, model, meta_model, checkpoint.strategy, watchdog, new_tokens)
        facts = _facts(config, asked, math, prepared)
        stop.wait_for_step()
        if evaluation is not None:
            return evaluate_only(context, config, model, loss, data, given, stop, watchdog, as_json=evaluation.as_json)
        training = Training(
            context, config, model, tokenizer, data, math, loss, _saver(context, config, facts), stop, watchdog,
            memory.ledger,
        )  # fmt: skip
        code = _train_and_save(training, meta_model.wrapper)
        if code == 0:
            tell_finish(context)
        return code


def _tell_failure(events: EventLog, kind: object, error: BaseException | None, trace: object) -> None:
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


def _facts(config: RunConfig, asked: RunConfig, math: TrainingMath, prepared: PreparedSet) -> RunFacts:
    return RunFacts(
        settings=kept_settings(config),
        identity=identity(config),
        asked={"identity": identity(asked), "settings": kept_settings(asked)},
        data=str(prepared.about["fingerprint"]),
        batch={
            "per_device": math.per_device,
            "processes": math.processes,
            "accumulation": math.accumulation,
            "effective": math.effective_batch,
        },
        steps_per_epoch=math.steps_per_epoch,
    )


def _tokenizer(
    context: RunContext, config: RunConfig, folder: Path, model: PreTrainedModel
) -> tuple[PreTrainedTokenizerBase, NewTokens | None]:
    """The tokenizer, and the tokens whose rows train, for which the model has room now."""
    tokenizer, named = tokenizer_and_new_tokens(config.model, folder)
    if not named.ids:
        return tokenizer, None
    new = resize_embeddings(model, named)
    tell_notices(context, new.notices(), about="new_tokens")
    return tokenizer, new


def _prepare_data(context: RunContext, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreparedSet:
    """Every process asks; one per disk does the work while the others wait for its file, not in a collective."""
    name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    with PreparingProgress(context.console) as progress:
        prepared = prepare(config.data, config.train.seed, tokenizer, name, progress=progress)
    context.processes.wait_for_all("data")
    refuse_different_data(context.processes, prepared.about["fingerprint"])
    context.events.write(
        "data",
        format=asdict(prepared.choice),
        folder=put_back(config, str(prepared.folder)),
        train=put_back(config, prepared.train.counts.as_dict()),
        validation=put_back(config, prepared.val.counts.as_dict()) if prepared.val else None,
    )
    return prepared


def _check_data(
    context: RunContext,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prepared: PreparedSet,
    new_tokens: NewTokens | None,
) -> None:
    embeddings = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    limits = ModelLimits(embeddings, model_positions(model.config))
    learnt = new_tokens.numbers if new_tokens is not None else {}
    for warning in enforce(refusals_and_warnings(prepared, tokenizer, limits, learnt)):
        text = " ".join(part for part in (warning.what, warning.why, warning.fix) if part)
        terminal.warn(context.console, context.events, "data", text)


def _lay_out(
    config: RunConfig,
    prepared: PreparedSet,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    filled: float,
) -> Data:
    """Rows as they are, or packed; and the batch layout that fits the attention code.

    Args:
        filled: How much of `data.max_length` a row takes on average.
    """
    layout: Literal["padded", "packed", "flat"] = "padded"
    if config.train.packing:
        layout = "flat" if model.config._attn_implementation in FLAT_ATTENTION else "packed"

    def documents(part: Prepared) -> Documents:
        return Documents(part, part.packs(config.data.max_length) if config.train.packing else None)

    one_shape = config.train.compile is True and (config.train.packing or filled >= NEARLY_FULL)
    return Data(
        train=documents(prepared.train),
        val=documents(prepared.val) if prepared.val is not None else None,
        collator=Collator(
            tokenizer.pad_token_id,
            layout,
            fill_to=config.data.max_length if one_shape else None,
        ),
    )


def _load_weights(
    context: RunContext,
    config: RunConfig,
    model: PeftModel,
    meta_model: MetaModel,
    way: LoadStrategy,
    watchdog: Watchdog,
    new_tokens: NewTokens | None,
) -> None:
    with LoadingProgress(context.console) as progress:

        def moved(done: int, total: int) -> None:
            watchdog.beat()
            progress(done, total)

        loaded = load_sharded_weights(
            model,
            meta_model,
            way,
            context.processes,
            config.train.seed,
            moved,
            on_host=offloads_params(config.parallel, context.processes.device),
            new_tokens=new_tokens,
        )
    context.processes.wait_for_all("weights")
    context.events.write("weights", **asdict(loaded))
    read, *remarkable = summary.weights_lines(loaded, meta_model)
    terminal.detail(context.console, "weights", read)
    for line in remarkable:
        terminal.say(context.console, "weights", line)


def _train_and_save(training: Training, wrapper: Wrapper | None) -> int:
    """The loop, from the first step or from a checkpoint; then what is published."""
    context, config, saver = training.context, training.config, training.saver
    resumed = resume_point(saver.store, training.model, context.processes, saver.facts, training.math)
    loop = TrainingLoop(training, resumed)
    samples = Samples(training, stopped=loop.stop_now)
    if resumed is not None:
        take_over(context)
        tell_resume(context, resumed, training.math)
    else:
        samples.ask("before")
    began = time.perf_counter()
    loop.run()
    step = loop.state.global_step
    evaluates = config.train.eval_strategy != "no"
    if evaluates and not loop.stopped and loop.eval_loss_at(step) is None:
        loop.evaluate()
    if loop.stopped and (step < training.math.steps or (evaluates and loop.eval_loss_at(step) is None)):
        return _end_early(loop)
    training.watchdog.enter(ENDING)
    best = None
    if config.train.load_best_model_at_end:
        best = load_best(context, training.model, saver.store, step, loop.eval_loss_at(step))
    adapter = write_final(
        context, config, training.model, wrapper, training.tokenizer, saver.store, training.stop, training.watchdog
    )
    seconds = time.perf_counter() - began
    samples.ask("after")
    tell_end(context, loop, seconds, best, adapter, on_random=config.model.weights == "random")
    samples.show()
    return 0


def _saver(context: RunContext, config: RunConfig, facts: RunFacts) -> CheckpointSaver:
    store = CheckpointStore(context.folder / CHECKPOINTS, config.train.save_total_limit)
    return CheckpointSaver(store, context, facts, config.train.save_minutes)


def _end_early(loop: TrainingLoop) -> int:
    """Stopped on request: the exit code."""
    context, saver, step = loop.training.context, loop.saver, loop.state.global_step
    saved = context.processes.share_from_main(context.processes.is_main and saver.has(step))
    if not saved:  # the last evaluation was cut short, after the loop's last chance to save
        loop.save()
        saver.finish()
        saved = saver.has(step)
    context.events.write("run_end", status="stopped", step=step)
    where = f"Checkpoint: {saver.store.path(step)}"
    if not saved:
        where = "Its checkpoint could not be written; the previous one is good."
    again = " The same command resumes from there." if context.asked.train.resume != "never" else ""
    context.console.print(
        f"Stopped on request after step {step} of {loop.math.steps}.{again} {where}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    # A rank that got no signal itself leaves like the others.
    interrupted = context.processes.agree(loop.training.stop.signal == signal.SIGINT)
    return INTERRUPTED if interrupted else PREEMPTED
