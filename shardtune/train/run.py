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
from shardtune.launch.exit_codes import FAILED, INTERRUPTED, PREEMPTED
from shardtune.launch.run_folder import CHECKPOINTS
from shardtune.model.blueprint import draw_up
from shardtune.model.load import tokenizer_and_new_tokens
from shardtune.model.new_tokens import make_room
from shardtune.model.quantized import hold_in_fp8, multiply_codes
from shardtune.observe import summary
from shardtune.observe.loading import LoadingProgress
from shardtune.observe.preparing import PreparingProgress
from shardtune.parallel.offload import offloads_params
from shardtune.parallel.processes import join
from shardtune.parallel.shard import shard_model
from shardtune.plan.steps import TrainingMath, training_math
from shardtune.train.account import (
    introduce,
    take_over,
    tell_end,
    tell_event_log_trouble,
    tell_finish,
    tell_notices,
    tell_plan,
    tell_resume,
    tell_router_loss,
    warn_of_random_weights,
    write_config,
)
from shardtune.train.attention import FLAT_ATTENTION, NEARLY_FULL, settle_packing
from shardtune.train.best import load_best
from shardtune.train.choices import (
    fp8_blocks,
    fp8_compute_notice,
    fuse,
    settle_autos,
    settle_dtype,
    settle_kernels,
    settle_layer_class,
    settle_precision,
    slow_precision_notice,
)
from shardtune.train.evaluation import evaluate_only, read_given, temporary_scene
from shardtune.train.final import write_final
from shardtune.train.fused_loss import use_fused_loss
from shardtune.train.interrupt import StopRequest
from shardtune.train.loop import set_up_loop
from shardtune.train.memory.allocator import allocator_of
from shardtune.train.memory.failure import MemoryAnswer
from shardtune.train.memory.ledger import Ledger
from shardtune.train.resume import resume_point
from shardtune.train.router_loss import coefficient, unused_notice
from shardtune.train.samples import Samples
from shardtune.train.saving import CheckpointSaver, RunFacts
from shardtune.train.scene import Data, Scene, open_scene, refuse_different_data, refuse_different_nodes
from shardtune.train.settings import check_trackers
from shardtune.train.trainer import ShardedSFTTrainer
from shardtune.train.watchdog import ENDING, JOINING, LOADING, PREPARING, Limits, Watchdog
from shardtune.train.weights import bring_in, find_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from shardtune.config.schema import RunConfig
    from shardtune.data.prepared import Prepared
    from shardtune.launch.evaluation import Evaluation
    from shardtune.model.blueprint import Blueprint
    from shardtune.model.families.family import Wrapper
    from shardtune.model.new_tokens import NewTokens
    from shardtune.observe.events import EventLog
    from shardtune.train.weights import Way


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
    check_trackers(resolved.config.train.report_to)
    stop, asked = stop or StopRequest(), resolved.config
    with (
        _watched(resolved.config) as watchdog,
        join(resolved.config.parallel) as processes,
        ExitStack() as at_end,
    ):
        resolved = settle_autos(
            resolved,
            device=processes.device.type,
            processes_here=int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size)),
        )
        config = resolved.config
        scene = (
            open_scene(asked, processes, run_id, at_end)
            if evaluation is None
            else temporary_scene(asked, processes, evaluation, at_end)
        )
        scene.events.tell = partial(tell_event_log_trouble, scene)
        at_end.callback(scene.events.finish)
        at_end.push(partial(_tell_failure, scene.events))
        memory = at_end.enter_context(_memory_answer(scene, config))
        refuse_different_nodes(processes, asked)
        watchdog.write_to(scene.folder, scene.events)
        watchdog.enter(PREPARING)
        introduce(scene, resolved)
        if config.model.weights == "random":
            warn_of_random_weights(scene)
        checkpoint = find_checkpoint(config.model, processes)
        blueprint = draw_up(config.model, checkpoint.folder, checkpoint.stored)
        resolved = settle_dtype(resolved, blueprint)
        if slow := slow_precision_notice(resolved.config.model.torch_dtype, processes.device.type):
            tell_notices(scene, [slow], about="config")
        resolved = settle_precision(resolved, blueprint, processes)
        if resolved.config.model.base_precision == "fp8":
            hold_in_fp8(blueprint.model, fp8_blocks(blueprint))
        tokenizer, new_tokens = _tokenizer(scene, config, checkpoint.folder, blueprint.model)
        ids = new_tokens.ids if new_tokens is not None else ()
        model, coverage, notices = add_lora(blueprint.model, config.lora, blueprint.family, ids)
        wanted = evaluation.adapter if evaluation is not None else None
        given = read_given(processes, model, config.model.model_name_or_path, wanted) if wanted is not None else None
        if given is not None:
            tell_notices(scene, given.notices, about="adapter")
        resolved, layer_notices = settle_layer_class(resolved, blueprint)
        tell_notices(scene, layer_notices, about="sharding")
        resolved = settle_kernels(resolved, blueprint.model, blueprint.family, processes.device)
        if resolved.config.train.fp8_compute:
            tell_notices(scene, [fp8_compute_notice(*multiply_codes(model), processes.device)], about="fp8_compute")
        fused = fuse(model, resolved.config.train)
        router_coefficient = coefficient(blueprint.model, config.train.extra.get("router_aux_loss_coef"))
        if resolved.config.train.fused_loss:
            causal = blueprint.family.why_not("packing", blueprint.model.config) is None
            use_fused_loss(blueprint.model, causal=causal, router_coefficient=router_coefficient)
        tell_router_loss(scene, router_coefficient)
        if unused := unused_notice(blueprint.model):
            tell_notices(scene, [unused], about="loss")
        tell_notices(scene, notices)
        prepared = _prepare_data(scene, config, tokenizer)
        watchdog.enter(LOADING)
        if evaluation is not None:
            prepared = replace(prepared, overlap=0)  # whoever evaluates on training rows means it
        _check_data(scene, blueprint.model, tokenizer, prepared, new_tokens)
        filled = prepared.train.counts.tokens / (prepared.train.counts.rows * config.data.max_length)
        resolved = settle_packing(resolved, blueprint.model, blueprint.family, processes.device, filled)
        config = resolved.config
        data = _lay_out(config, prepared, blueprint.model, tokenizer, filled)
        math = training_math(config.train, rows=len(data.train), tokens=data.tokens, processes=processes.world_size)
        write_config(scene, resolved)
        set_seed(config.train.seed)
        compute_dtype = torch.bfloat16 if config.train.bf16 else None
        sharding = shard_model(
            model,
            config.parallel,
            processes.mesh,
            compute_dtype,
            blueprint.layer_class,
            selective=config.train.gradient_checkpointing == "selective",
            compiled=config.train.compile is True,
        )
        if evaluation is None:
            tell_plan(scene, resolved, prepared, data, math, coverage, sharding, fused)
        memory.config = config
        memory.ledger.watch(model)
        _load_weights(scene, config, model, blueprint, checkpoint.way, watchdog, new_tokens)
        facts = _facts(config, asked, math, prepared)
        stop.wait_for_step()
        if evaluation is not None:
            return evaluate_only(
                scene, config, model, tokenizer, data, math, _saver(scene, config, facts), given, stop, watchdog,
                as_json=evaluation.as_json,
            )  # fmt: skip
        code = _train_and_save(
            scene, resolved, model, blueprint.wrapper, tokenizer, data, math, facts, stop, watchdog, memory.ledger
        )
        if code == 0:
            tell_finish(scene)
        return code


def _tell_failure(events: EventLog, kind: object, error: BaseException | None, trace: object) -> None:
    """The last event of a run that failed, where this process can still write it; a refused start is not its end."""
    if isinstance(error, Exception) and not (events.held and isinstance(error, UserInputError)):
        events.release()
        code = error.exit_code if isinstance(error, ShardtuneError) else FAILED
        text = error.what if isinstance(error, ShardtuneError) else repr(error)
        events.write("run_failed", exit_code=code, text=text)


def _memory_answer(scene: Scene, config: RunConfig) -> MemoryAnswer:
    device = scene.processes.device
    return MemoryAnswer(Ledger(allocator_of(device), device), scene.events, scene.processes, config)


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
    scene: Scene, config: RunConfig, folder: Path, model: PreTrainedModel
) -> tuple[PreTrainedTokenizerBase, NewTokens | None]:
    """The tokenizer, and the tokens whose rows train, for which the model has room now."""
    tokenizer, named = tokenizer_and_new_tokens(config.model, folder)
    if not named.ids:
        return tokenizer, None
    new = make_room(model, named)
    tell_notices(scene, new.notices(), about="new_tokens")
    return tokenizer, new


def _prepare_data(scene: Scene, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreparedSet:
    """Every process asks; one per disk does the work while the others wait for its file, not in a collective."""
    name = config.model.tokenizer_name_or_path or config.model.model_name_or_path
    with PreparingProgress(scene.console) as progress:
        prepared = prepare(config.data, config.train.seed, tokenizer, name, progress=progress)
    scene.processes.wait_for_all("data")
    refuse_different_data(scene.processes, prepared.about["fingerprint"])
    scene.events.write(
        "data",
        format=asdict(prepared.choice),
        folder=put_back(config, str(prepared.folder)),
        train=put_back(config, prepared.train.counts.as_dict()),
        validation=put_back(config, prepared.val.counts.as_dict()) if prepared.val else None,
    )
    return prepared


def _check_data(
    scene: Scene,
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
        summary.warn(scene.console, scene.events, "data", text)


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
            fused_loss=config.train.fused_loss is True,
        ),
    )


def _load_weights(
    scene: Scene,
    config: RunConfig,
    model: PeftModel,
    blueprint: Blueprint,
    way: Way,
    watchdog: Watchdog,
    new_tokens: NewTokens | None,
) -> None:
    with LoadingProgress(scene.console) as progress:

        def moved(done: int, total: int) -> None:
            watchdog.beat()
            progress(done, total)

        loaded = bring_in(
            model,
            blueprint,
            way,
            scene.processes,
            config.train.seed,
            moved,
            on_host=offloads_params(config.parallel, scene.processes.device),
            new_tokens=new_tokens,
        )
    scene.processes.wait_for_all("weights")
    scene.events.write("weights", **asdict(loaded))
    read, *remarkable = summary.weights_lines(loaded, blueprint)
    summary.detail(scene.console, "weights", read)
    for line in remarkable:
        summary.say(scene.console, "weights", line)


def _train_and_save(
    scene: Scene,
    resolved: ResolvedConfig,
    model: PeftModel,
    wrapper: Wrapper | None,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    math: TrainingMath,
    facts: RunFacts,
    stop: StopRequest,
    watchdog: Watchdog,
    ledger: Ledger,
) -> int:
    config = resolved.config
    saver = _saver(scene, config, facts)
    store = saver.store
    resumed = resume_point(store, model, scene.processes, facts, math)
    loop = set_up_loop(scene, config, model, tokenizer, data, math, facts, saver, resumed, stop, watchdog, ledger)
    if resumed is not None:
        take_over(scene)
    trainer = loop.trainer
    samples = Samples(scene, trainer, data, config.train, stopped=loop.stopping.now, beat=watchdog.beat)
    if resumed is not None:
        tell_resume(scene, resumed, math)
    else:
        samples.ask("before")
    torch.manual_seed(config.train.seed + scene.processes.rank)  # each rank its own dropout
    began = time.perf_counter()
    loop.train()
    if loop.was_stopped:
        return _end_early(scene, trainer, stop, math)
    if config.train.eval_strategy != "no" and trainer.eval_loss_at(trainer.state.global_step) is None:
        trainer.evaluate()
        if loop.stopping.stopped:
            _save_if_missing(scene, trainer)
            return _end_early(scene, trainer, stop, math)
    watchdog.enter(ENDING)
    best = None
    if config.train.load_best_model_at_end:
        step = trainer.state.global_step
        best = load_best(scene, model, store, step, trainer.eval_loss_at(step))
    adapter = write_final(scene, config, model, wrapper, tokenizer, store, stop, watchdog)
    seconds = time.perf_counter() - began
    samples.ask("after")
    tell_end(scene, trainer, seconds, best, adapter, on_random=config.model.weights == "random")
    samples.show()
    return 0


def _saver(scene: Scene, config: RunConfig, facts: RunFacts) -> CheckpointSaver:
    store = CheckpointStore(scene.folder / CHECKPOINTS, config.train.save_total_limit)
    return CheckpointSaver(store, scene.processes, scene.console, scene.events, facts)


def _save_if_missing(scene: Scene, trainer: ShardedSFTTrainer) -> None:
    """The last evaluation was cut short, after the last chance of the loop to save."""
    there = trainer.saver.has(trainer.state.global_step) if scene.processes.is_main else True
    if not scene.processes.share_from_main(there):
        trainer._save_checkpoint(trainer.model, None)
        trainer.saver.finish()


def _end_early(scene: Scene, trainer: ShardedSFTTrainer, stop: StopRequest, math: TrainingMath) -> int:
    step = trainer.state.global_step
    store = trainer.saver.store
    saved = trainer.saver.has(step) if scene.processes.is_main else True
    scene.events.write("run_end", status="stopped", step=step)
    told = (
        f"Checkpoint: {store.path(step)}" if saved else "Its checkpoint could not be written; the one before is good."
    )
    again = " The same command goes on from there." if scene.asked.train.resume != "never" else ""
    scene.console.print(
        f"Stopped on request after step {step} of {math.steps}.{again} {told}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    # A rank that got no signal itself leaves like the others.
    return INTERRUPTED if scene.processes.agree(stop.signal == signal.SIGINT) else PREEMPTED
