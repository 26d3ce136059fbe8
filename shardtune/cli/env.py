"""`shardtune env`: words for what this machine is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def env(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", metavar="FOLDER", help="Where runs are written; its disk is looked at.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="For programs, and for a bug report.")] = False,
) -> None:
    """Show this machine: CPUs, memory and limits, GPUs and how they are joined, networks, libraries, troubles.

    Nothing is started. What cannot be known is left out; secrets in variables are hidden.
    """
    from shardtune.observe.hardware import describe_hardware

    facts = describe_hardware(output_dir)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    from rich.console import Console

    from shardtune.observe.hardware_page import show_hardware

    show_hardware(Console(), facts)
