"""`shardtune cluster`: what concerns a job for a scheduler, without sending it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import AsJson, Config, JobCommand, NodeProcesses, Overrides, Script, To

app = typer.Typer(no_args_is_help=True, help="Jobs for clusters: check one before it is sent, bring over today's.")


@app.command(cls=JobCommand)
def lint(
    config: Config,
    script: Script = None,
    override: Overrides = None,
    to: To = None,
    nproc: NodeProcesses = "",
    as_json: AsJson = False,
) -> None:
    """Check the settings, the rendered pods and the plan for what clusters accept and then break on.

    Asks no cluster. docs/cluster-lint.md has every rule.

    Exit codes: 0 no errors (there may be warnings); 1 errors; 2 invalid input.
    """
    from shardtune.cli.cluster_job import described_job
    from shardtune.cluster.lint import has_errors
    from shardtune.cluster.lint import lint as check

    described = described_job(config, override, to, script=script, nproc=nproc)
    findings = check(described.job, described.manifests(), described.plan, described.target)
    if as_json:
        from shardtune.cluster.lint_page import as_json as to_json

        typer.echo(json.dumps(to_json(findings, described.job.name, described.target), indent=1, ensure_ascii=False))
    else:
        from rich.console import Console

        from shardtune.cluster.lint_page import show

        show(Console(), findings)
    raise typer.Exit(int(has_errors(findings)))


@app.command(cls=JobCommand)
def scc(config: Config, script: Script = None, override: Overrides = None, to: To = None) -> None:
    """Print what an administrator of OpenShift would apply for this job: SCC, role, ServiceAccount, binding.

    Allows what the job asks for beyond `restricted-v2` and nothing else. Prints a comment where that admits the job.

    Exit codes: 0; 2 invalid input.
    """
    import yaml

    from shardtune.cli.cluster_job import described_job
    from shardtune.cluster.lint_subject import Subject
    from shardtune.cluster.openshift import beyond_restricted, render_scc

    described = described_job(config, override, to, script=script)
    pod = Subject(described.job, described.target, described.manifests()).pods[0]
    objects = render_scc(described.job, pod)
    if not objects:
        typer.echo("# restricted-v2 admits this job: nothing has to be applied.")
        return
    asked = beyond_restricted(pod)
    typer.echo(f"# For an administrator (oc apply -f). The job asks for: {', '.join(asked)}.")
    if "capability IPC_LOCK" in asked and "user id 0" not in asked:
        typer.echo("# IPC_LOCK does nothing for a user other than root: memlock must come from the container runtime.")
    typer.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)


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
