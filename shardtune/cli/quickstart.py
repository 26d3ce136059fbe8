"""`shardtune quickstart`: words for the first five minutes."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def quickstart(
    model: str | None = typer.Option(
        None,
        "--model",
        metavar="PATH|HUB",
        help="SmolLM2-135M-Instruct from elsewhere than the installed wheel or the hub.",
    ),
    output_dir: Path = typer.Option(
        Path("runs/quickstart"), "--output-dir", help="Where data, config and run are written."
    ),
    seed: int = typer.Option(42, "--seed", min=0, help="Seeds data, adapters and order."),
    nproc: int = typer.Option(2, "--nproc", min=1, help="FSDP2 processes."),
    tiny: bool = typer.Option(
        False, "--tiny", help="The same path on a random toy model, in seconds; it learns nothing."
    ),
) -> None:
    """Teach SmolLM2-135M to turn sentences into JSON, on this machine's CPU, and show before and after."""
    from shardtune.quickstart.show import show

    sys.exit(show(model=model, output_dir=output_dir, seed=seed, nproc=nproc, tiny=tiny))
