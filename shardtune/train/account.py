"""What does a run print and log around its steps? Its start, notices, the plan, where it resumes, how it ended."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
from rich.console import Console
from rich.padding import Padding
from transformers.utils import logging as transformers_logging

from shardtune import __version__, terminal
from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import ResolvedConfig, render_yaml
from shardtune.config.redact import hide_values, redacted
from shardtune.data.inspect import format_found, format_line
from shardtune.observe import environment
from shardtune.plan.resolve import Notice
from shardtune.plan.steps import math_lines
from shardtune.run.base_model import BaseModel, record_base, recorded_base
from shardtune.run.folder import CHECKPOINTS, RECORD
from shardtune.run.which_run import record_finish, record_start
from shardtune.train import summary
from shardtune.train.context import RunContext
from shardtune.train.run_files import release_run_files, report_hardware, warn_on_write_error, write_run_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardtune.config.accelerate_file import Verdict
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.best import Best
    from shardtune.train.loop import TrainingLoop
    from shardtune.train.losses import Loss
    from shardtune.train.resume import ResumePoint
    from shardtune.train.setup import Setup


def introduce(context: RunContext, asked: ResolvedConfig) -> None:
    described = environment.describe()
    context.events.write(
        "run_start",
        run=context.folder.name,
        world_size=context.processes.world_size,
        environment=described,
        command=hide_values(environment.command_line(), asked.config),
    )
    write_config(context, asked)
    config = asked.config
    _quieten_libraries(context.console)
    if context.temporary:
        context.console.print(f"[bold]shardtune[/] {__version__}  {context.folder.name}", highlight=False)
    else:
        context.console.print(f"[bold]shardtune[/] {__version__}  run {context.folder.name}", highlight=False)
        terminal.say(context.console, "folder", str(context.folder))
    report_hardware(context, workers=config.train.dataloader_num_workers)
    report_notices(context, [Notice("config", text) for text in asked.notices])
    if asked.verdicts:
        _report_verdicts(context, asked.verdicts)
    if config.model.weights == "random":
        text = (
            "RANDOM weights (model.weights: random): good for speed and memory; an adapter trained on them is useless."
        )
        terminal.warn(context.console, context.events, "weights", text)


def _report_verdicts(context: RunContext, verdicts: Sequence[Verdict]) -> None:
    """How accelerate's file was translated: in one line, or key by key with -v; the event log has every key."""
    from shardtune.config.accelerate_file import verdict_line, verdict_table

    if terminal.is_verbose():
        context.console.print(verdict_table(verdicts))
    text = f"accelerate's file: {verdict_line(verdicts)}"
    terminal.say(context.console, "config", f"{text}; -v shows why" if not terminal.is_verbose() else text)
    keys = [f"{v.key}: {v.value} ({' '.join(filter(None, (v.verdict, v.sets, v.why)))})" for v in verdicts]
    context.events.write("notice", about="accelerate", text=f"{text}. {'; '.join(keys)}")


def _quieten_libraries(console: Console) -> None:
    """Turn off the progress bars and warnings of the libraries; a bar for loading weights stays, on a terminal."""
    datasets.disable_progress_bars()
    transformers_logging.set_verbosity_error()
    if console.quiet or not console.is_terminal:
        transformers_logging.disable_progress_bar()


def write_config(context: RunContext, resolved: ResolvedConfig) -> None:
    """Written at the start, and again when every `auto` is resolved."""
    if context.processes.is_main:
        write_run_file(context, "config.yaml", render_yaml(redacted(resolved)))


def take_over(context: RunContext) -> None:
    """The run resumes under this config. Not earlier: a config that is refused must change nothing."""
    release_run_files(context)
    if context.processes.is_main:
        with warn_on_write_error(context, RECORD):
            record_start(context.folder, context.asked)


def record_base_model(context: RunContext, setup: Setup) -> None:
    """Which model the adapter belongs to, for whatever uses it later. Not before a resumed run is taken over."""
    section = setup.config.model
    if context.processes.is_main and section.weights == "checkpoint":
        folder = Path(setup.model.base_model.model.name_or_path)
        base = BaseModel.read(section.model_name_or_path, folder)
        with warn_on_write_error(context, RECORD):
            if base is not None and base != recorded_base(context.folder):
                record_base(context.folder, base)


def report_notices(context: RunContext, notices: Iterable[Notice]) -> None:
    for notice in notices:
        terminal.say(context.console, "notice", notice.text, "yellow")
        context.events.write("notice", about=notice.about, text=notice.text)


def report_loss(context: RunContext, loss: Loss) -> None:
    if (description := loss.description) is not None:
        terminal.say(context.console, "loss", description)
        context.events.write("notice", about="loss", text=description)


def report_plan(context: RunContext, setup: Setup) -> None:
    config, prepared, coverage = setup.config, setup.prepared, setup.built.coverage
    batch, steps = math_lines(setup.math, "sequences" if config.train.packing else "rows")
    compute = "bfloat16" if config.train.bf16 else config.model.torch_dtype
    lines = {
        "model": f"{config.model.model_name_or_path} ({coverage.base:,} parameters, computed in {compute})",
        "data": summary.data_line(prepared.train.counts),
        "format": format_line(*format_found(prepared)),
        "eval": summary.data_line(prepared.val.counts) if prepared.val else "none (data.val_split is null)",
        "packing": summary.packing_line(setup.data, setup.run),
        "sharding": summary.sharding_line(setup.sharding, context.processes, setup.run),
        "traffic": summary.traffic_line(setup.traffic, setup.sharding.mesh),
        "kernels": summary.kernels_line(setup.run, setup.built.fused),
        "memory": summary.checkpointing_line(config.train, context.processes.device.type)
        + (f" ({why})" if (why := setup.run.reason("train.gradient_checkpointing")) else ""),
        "batch": batch,
        "steps": steps,
        "trains": summary.coverage_line(coverage),
    }
    for label, text in lines.items():
        if text is None:
            continue
        (terminal.detail if label == "kernels" else terminal.say)(context.console, label, text)
    if len(coverage.rows) > 1 or terminal.is_verbose():
        context.console.print(Padding(summary.adapter_table(coverage), (0, 0, 0, 10), expand=False))
    sharding = {**summary.sharding_facts(setup.sharding), "traffic": asdict(setup.traffic.sent)}
    context.events.write(
        "plan",
        math=asdict(setup.math),
        adapters=asdict(coverage),
        sharding=sharding,
        expected=setup.expected.event(),
    )


def log_resume(context: RunContext, resumed: ResumePoint, math: TrainingMath) -> None:
    for line in resumed.damaged:
        text = f"A checkpoint is damaged and was set aside. {line}"
        terminal.warn(context.console, context.events, "checkpoint", text)
    if context.processes.is_main:
        for path in CheckpointStore(context.folder / CHECKPOINTS, keep=None).not_folders():
            text = f"{path} is a link or a file, not a checkpoint folder: it is ignored."
            terminal.warn(context.console, context.events, "checkpoint", text)
    epoch, done = divmod(resumed.step, math.steps_per_epoch)
    place = f"step {resumed.step} of {math.steps} (epoch {epoch + 1}, {done} of {math.steps_per_epoch} steps done)"
    terminal.say(context.console, "resume", f"{place}, from {resumed.path}")
    for line in resumed.notices:
        terminal.say(context.console, "changed", line)
    context.events.write(
        "resume",
        step=resumed.step,
        path=str(resumed.path),
        world_size=context.processes.world_size,
        random_state="restored" if resumed.rng is not None else "new: another number of processes",
        changes=list(resumed.notices),
        damaged=list(resumed.damaged),
    )


def report_end(loop: TrainingLoop, seconds: float, best: Best | None, adapter: Path) -> None:
    """Args:
    best: The checkpoint the weights were taken from, if not the last step.
    adapter: Where they are.
    """
    context, on_random = loop.training.context, loop.config.model.weights == "random"
    losses = [entry["loss"] for entry in loop.state.log_history if "loss" in entry]
    eval_loss = best.eval_loss if best is not None else loop.eval_loss_at(loop.state.global_step)
    context.events.write(
        "run_end",
        status="done",
        step=loop.state.global_step,
        seconds=round(seconds, 2),
        loss=losses[-1] if losses else None,
        eval_loss=eval_loss,
        adapter=str(adapter),
    )
    text = f"{terminal.count(loop.state.global_step, 'step')} in {terminal.clock(seconds)}"
    if losses:
        text += f", loss {losses[0]:.4f} → {losses[-1]:.4f}"
    if eval_loss is not None:
        text += f", eval loss {eval_loss:.4f}" + (f" (best, step {best.step})" if best is not None else "")
    terminal.say(context.console, "done", text)
    profiled = loop.profiles
    measured = profiled.medians().get("seconds.step")
    if planned := loop.training.setup.expected.beside(profiled.peak(), measured):
        terminal.say(context.console, "planned", planned)
    terminal.say(
        context.console, "adapter", f"{adapter} (trained on RANDOM weights: useless)" if on_random else str(adapter)
    )


def record_success(context: RunContext) -> None:
    """The run is complete: the same command starts a new one."""
    if context.processes.is_main:
        with warn_on_write_error(
            context, RECORD, "The same command would resume this run instead of starting a new one."
        ):
            record_finish(context.folder, context.asked)


def report_event_log_error(context: RunContext, text: str) -> None:
    """Events cannot be written, or can be again: reported once per node, which may have its own disk."""
    if context.processes.is_main:
        terminal.say(context.console, "warning", text, "bold red")
    elif context.processes.local_rank == 0:
        print(f"rank {context.processes.rank}: warning: {text}", file=sys.stderr, flush=True)
