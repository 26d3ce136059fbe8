"""`shardtune env`: describes this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def env(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", metavar="FOLDER", help="Where runs are written; its disk is described.")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs and bug reports.")] = False,
) -> None:
    """Show this machine: CPUs, memory, limits, GPUs and their interconnect, networks, libraries, and likely problems.

    Nothing is started. What is not known is left out; secrets in environment variables are hidden.
    """
    from shardtune.observe.hardware import describe_hardware

    facts = describe_hardware(output_dir)
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    from rich.console import Console

    from shardtune.observe.hardware_page import show_hardware

    show_hardware(Console(), facts)
