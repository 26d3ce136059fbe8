"""`shardtune cluster`: import. Starts nothing and contacts nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Jobs for clusters: bring over what you have today.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass  # a group, also while it has one command


@app.command("import")
def import_(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|COMMAND",
            help="A PyTorchJob, TrainJob, JobSet or Job (YAML), a shell script with a command of Run:ai, or that "
            "command itself behind --.",
            show_default=False,
        ),
    ],
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="The launcher script that the job's command runs.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the section to a new file.")
    ] = None,
    keep_uid: Annotated[
        bool, typer.Option("--keep-uid", help="Write a fixed uid and gid, which OpenShift's restricted-v2 refuses.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Section and verdicts as JSON.")] = False,
) -> None:
    """Turn today's job into a section `cluster`, with a verdict for each flag and field.

    The section goes to standard output (or --output), the verdicts to standard error.

    Exit codes: 0 read; 2 this is no job.
    """
    from shardtune.cluster.import_job import import_job
    from shardtune.cluster.import_report import as_json as to_json
    from shardtune.cluster.import_report import as_yaml, verdict_table
    from shardtune.errors import UserInputError

    found = import_job(what, script, keep_uid=keep_uid)
    if output is not None:
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(as_yaml(found))
        except FileExistsError:
            raise UserInputError(f"'{output}' exists.", fix="Name another file, or remove it first.") from None
        except OSError as error:
            raise UserInputError(f"'{output}' cannot be written.", why=str(error)) from error
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    Console(file=sys.stderr).print(verdict_table(found.verdicts, "today's job"))
    for step in found.steps:
        typer.echo(f"first: {step}", err=True)
    if output is None:
        typer.echo(as_yaml(found), nl=False)
    else:
        typer.echo(f"{output}: put your run's settings beside it, then `shardtune config validate {output}`.")
