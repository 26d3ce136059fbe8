"""What is said and written down around a training? The introduction, the plan, where it goes on, how it ended."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import datasets
from rich.console import Console
from rich.padding import Padding
from transformers.utils import logging as transformers_logging

from shardtune import __version__
from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import ResolvedConfig, render_yaml
from shardtune.config.redact import hide_values, redacted
from shardtune.data.inspect import format_found, format_line
from shardtune.launch.run_folder import CHECKPOINTS, RECORD
from shardtune.launch.which_run import record_finish, record_start
from shardtune.observe import environment, summary
from shardtune.train.machines import tell_machines
from shardtune.train.run_files import expendable, release_run_files, write_run_file
from shardtune.train.scene import Data, Scene

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardtune.adapters.coverage import Coverage
    from shardtune.config.accelerate_file import Verdict
    from shardtune.data.prepare import PreparedSet
    from shardtune.parallel.shard import Sharding
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.best import Best
    from shardtune.train.choices import Fused
    from shardtune.train.resume import ResumePoint
    from shardtune.train.trainer import ShardedSFTTrainer


def introduce(scene: Scene, resolved: ResolvedConfig) -> None:
    described = environment.describe()
    scene.events.write(
        "run_start",
        run=scene.folder.name,
        world_size=scene.processes.world_size,
        environment=described,
        command=hide_values(environment.command_line(), resolved.config),
    )
    write_config(scene, resolved)
    config = resolved.config
    _quieten_libraries(scene.console)
    if scene.temporary:
        scene.console.print(f"[bold]shardtune[/] {__version__}  {scene.folder.name}", highlight=False)
    else:
        scene.console.print(f"[bold]shardtune[/] {__version__}  run {scene.folder.name}", highlight=False)
        summary.say(scene.console, "folder", str(scene.folder))
    tell_machines(scene, workers=int(config.train.extra.get("dataloader_num_workers", 0)))
    tell_notices(scene, list(resolved.notices), about="config")
    if resolved.verdicts:
        _tell_verdicts(scene, resolved.verdicts)


def _tell_verdicts(scene: Scene, verdicts: Sequence[Verdict]) -> None:
    """What became of accelerate's file: in one line, or key by key with -v; the events hold every key."""
    from shardtune.config.accelerate_file import verdict_line, verdict_table

    if summary.is_verbose():
        scene.console.print(verdict_table(verdicts))
    text = f"accelerate's file: {verdict_line(verdicts)}"
    summary.say(scene.console, "config", f"{text}; -v tells why" if not summary.is_verbose() else text)
    keys = [f"{v.key}: {v.value} ({' '.join(filter(None, (v.verdict, v.sets, v.why)))})" for v in verdicts]
    scene.events.write("notice", about="accelerate", text=f"{text}. {'; '.join(keys)}")


def _quieten_libraries(console: Console) -> None:
    """Their bars and advice would stand between our lines; a bar for loading weights stays, on a terminal."""
    datasets.disable_progress_bars()
    transformers_logging.set_verbosity_error()
    if console.quiet or not console.is_terminal:
        transformers_logging.disable_progress_bar()


def write_config(scene: Scene, resolved: ResolvedConfig) -> None:
    """Written at the start, and again when the last `auto` is settled."""
    if scene.processes.is_main:
        write_run_file(scene, "config.yaml", render_yaml(redacted(resolved)))


def take_over(scene: Scene) -> None:
    """The run goes on under this config. Not earlier: one that is refused must change nothing."""
    release_run_files(scene)
    if scene.processes.is_main:
        with expendable(scene, RECORD):
            record_start(scene.folder, scene.asked)


def tell_notices(scene: Scene, notices: list[str], about: str = "lora") -> None:
    """How lora.target_modules was understood where that is not what its words say, or what a setting came to."""
    for notice in notices:
        summary.say(scene.console, "notice", notice, "yellow")
        scene.events.write("notice", about=about, text=notice)


def tell_router_loss(scene: Scene, coefficient: float) -> None:
    if coefficient:
        text = (
            f"cross-entropy + {coefficient:g} × the routers' auxiliary loss (the model's router_aux_loss_coef; "
            "train.extra.router_aux_loss_coef: 0 leaves it out); the validation loss is the cross-entropy alone"
        )
        summary.say(scene.console, "loss", text)
        scene.events.write("notice", about="loss", text=text)


def tell_plan(
    scene: Scene,
    resolved: ResolvedConfig,
    prepared: PreparedSet,
    data: Data,
    math: TrainingMath,
    coverage: Coverage,
    sharding: Sharding,
    fused: Fused,
) -> None:
    config = resolved.config
    batch, steps = summary.math_lines(math, "sequences" if config.train.packing else "rows")
    compute = "bfloat16" if config.train.bf16 else config.model.torch_dtype
    lines = {
        "model": f"{config.model.model_name_or_path} ({coverage.base:,} parameters, computed in {compute})",
        "data": summary.data_line(prepared.train.counts),
        "format": format_line(*format_found(prepared)),
        "eval": summary.data_line(prepared.val.counts) if prepared.val else "none (data.val_split is null)",
        "packing": summary.packing_line(data.train, resolved, filled=data.collator.fill_to is not None),
        "sharding": summary.sharding_line(sharding, scene.processes),
        "kernels": summary.kernels_line(resolved, fused.lora, fused.experts),
        "memory": summary.checkpointing_line(config.train, scene.processes.device.type),
        "batch": batch,
        "steps": steps,
        "trains": summary.coverage_line(coverage),
    }
    for label, text in lines.items():
        (summary.detail if label == "kernels" else summary.say)(scene.console, label, text)
    if len(coverage.rows) > 1 or summary.is_verbose():
        scene.console.print(Padding(summary.adapter_table(coverage), (0, 0, 0, 10), expand=False))
    scene.events.write("plan", math=asdict(math), adapters=asdict(coverage), sharding=asdict(sharding))


def tell_resume(scene: Scene, resumed: ResumePoint, math: TrainingMath) -> None:
    for line in resumed.damaged:
        text = f"A checkpoint is damaged and was set aside. {line}"
        summary.warn(scene.console, scene.events, "checkpoint", text)
    if scene.processes.is_main:
        for path in CheckpointStore(scene.folder / CHECKPOINTS, keep=None).not_folders():
            text = f"{path} is a link or a file, not a checkpoint's folder: it is not read."
            summary.warn(scene.console, scene.events, "checkpoint", text)
    epoch, done = divmod(resumed.step, math.steps_per_epoch)
    place = f"step {resumed.step} of {math.steps} (epoch {epoch + 1}, {done} of {math.steps_per_epoch} steps done)"
    summary.say(scene.console, "resume", f"{place}, from {resumed.path}")
    for line in resumed.told:
        summary.say(scene.console, "changed", line)
    scene.events.write(
        "resume",
        step=resumed.step,
        path=str(resumed.path),
        world_size=scene.processes.world_size,
        random_state="restored" if resumed.rng is not None else "new: another number of processes",
        changes=list(resumed.told),
        damaged=list(resumed.damaged),
    )


def warn_of_random_weights(scene: Scene) -> None:
    """Said where nobody overlooks it, and kept for reports."""
    text = (
        "RANDOM weights (model.weights: random): good for speed and memory; nothing that is trained on them means "
        "anything."
    )
    summary.warn(scene.console, scene.events, "weights", text)


def tell_end(
    scene: Scene, trainer: ShardedSFTTrainer, seconds: float, best: Best | None, adapter: Path, *, on_random: bool
) -> None:
    """Args:
    best: What the weights were taken from, if not the last step.
    adapter: Where they are.
    """
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    eval_loss = best.eval_loss if best is not None else trainer.eval_loss_at(trainer.state.global_step)
    scene.events.write(
        "run_end",
        status="done",
        step=trainer.state.global_step,
        seconds=round(seconds, 2),
        loss=losses[-1] if losses else None,
        eval_loss=eval_loss,
        adapter=str(adapter),
    )
    text = f"{trainer.state.global_step} steps in {summary.clock(seconds)}"
    if losses:
        text += f", loss {losses[0]:.4f} → {losses[-1]:.4f}"
    if eval_loss is not None:
        text += f", eval loss {eval_loss:.4f}" + (f" (best, step {best.step})" if best is not None else "")
    summary.say(scene.console, "done", text)
    summary.say(scene.console, "adapter", f"{adapter} (of RANDOM weights: of no use)" if on_random else str(adapter))


def tell_finish(scene: Scene) -> None:
    """From here on the same command starts a new run."""
    if scene.processes.is_main:
        with expendable(scene, RECORD, "The same command would go on with this run instead of starting a new one."):
            record_finish(scene.folder, scene.asked)


def tell_event_log_trouble(scene: Scene, text: str) -> None:
    """That events cannot be written, and that they can again: said once on each node, which may have its own disk."""
    if scene.processes.is_main:
        summary.say(scene.console, "warning", text, "bold red")
    elif scene.processes.local_rank == 0:
        print(f"rank {scene.processes.rank}: warning: {text}", file=sys.stderr, flush=True)
