"""`shardtune eval-loss CONFIG`: words for an evaluation without a training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import AccelerateConfig, Config, Overrides


def eval_loss(
    config: Config,
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter",
            metavar="PATH",
            help="A run's folder, its final/, a checkpoint, or any PEFT adapter that fits the `lora` section; default: "
            "none.",
        ),
    ] = None,
    override: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object on stdout.")] = False,
    nproc: Annotated[
        str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto = one per GPU, else one.")
    ] = "",
    accelerate_config: AccelerateConfig = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start more processes than this machine has memory or cores for.")
    ] = False,
) -> None:
    """The loss of a model on the validation rows (data.val_split), as a training of the same CONFIG measures it.

    Per supervised token, over all ranks. The model as it is, or with an adapter. Leaves no run folder behind.

    Exit codes: as of `shardtune train` (docs/exit-codes.md).
    """
    from shardtune.launch.ending import leave
    from shardtune.launch.evaluation import Evaluation
    from shardtune.launch.start import start
    from shardtune.observe.output import unstoppable_output

    overrides = [*(override or ()), "train.report_to=none"]
    if nproc:
        overrides.append(f"parallel.nproc={nproc}")
    with unstoppable_output():
        code = start(
            config,
            overrides,
            accelerate_config,
            None,
            os.environ,
            force=force,
            evaluation=Evaluation(adapter, as_json),
        )
    leave(code)
