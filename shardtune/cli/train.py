"""`shardtune train CONFIG`: words for starting a run here, or for being one of its workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

EPILOG = "Settings and their meaning: `shardtune config reference`. Exit codes: 0 done, 2 wrong input, 130/143 stopped."


def train(
    config: Path = typer.Argument(help="The run's YAML.", metavar="CONFIG"),
    override: list[str] = typer.Option(
        [],
        "--override",
        "-o",
        metavar="KEY=VALUE",
        help="Change a setting, e.g. -o train.learning_rate=1e-4. Repeatable.",
    ),
    nproc: str = typer.Option(
        "", "--nproc", metavar="N|auto", help="Processes on this machine; auto = one per GPU, else one."
    ),
    accelerate_config: Path | None = typer.Option(
        None, "--accelerate-config", metavar="FILE", help="Translate an accelerate FSDP file; every key gets a verdict."
    ),
    debug_freq: int | None = typer.Option(None, "--debug-freq", metavar="N", help="Short for -o train.debug_freq=N."),
    run_id: str | None = typer.Option(
        None,
        "--run-id",
        metavar="NAME",
        help="Name of the run's folder under train.output_dir (default: date and time).",
    ),
) -> None:
    """Train a LoRA adapter as CONFIG says, sharded over the processes of this machine.

    Under torchrun, accelerate launch or a scheduler's RANK/WORLD_SIZE it becomes one of their workers.
    """
    from shardtune.launch.start import start

    overrides = list(override)
    if nproc:
        overrides.append(f"parallel.nproc={nproc}")
    if debug_freq is not None:
        overrides.append(f"train.debug_freq={debug_freq}")
    sys.exit(start(config, overrides, accelerate_config, run_id, os.environ))
