"""`shardtune cluster`: what concerns a job for a scheduler, without sending it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import Config, ConfigCommand, Overrides

if TYPE_CHECKING:
    from shardtune.cluster.manifests import Manifests
    from shardtune.cluster.spec import ClusterJob
    from shardtune.config import ResolvedConfig
    from shardtune.plan.report import Plan

app = typer.Typer(no_args_is_help=True, help="Check a job for a cluster, before it is submitted.")
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="KIND",
        help="runai, trainjob, pytorchjob, jobset, job, slurm, docker, podman or local-pods; default: cluster.target.",
    ),
]


@app.command(cls=ConfigCommand)
def lint(
    config: Config,
    override: Overrides = None,
    to: To = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check the settings, the rendered pods and the plan for what clusters accept and then break on.

    Asks no cluster. docs/cluster-lint.md has every rule.

    Exit codes: 0 no errors (there may be warnings); 1 errors; 2 invalid input.
    """
    from shardtune.cluster.lint import has_errors
    from shardtune.cluster.lint import lint as check

    resolved, target = _load(config, override, to)
    plan = _plan(resolved)
    job = _job(resolved, config, plan)
    findings = check(job, _manifests(job, target), plan, target)
    if as_json:
        from shardtune.cluster.lint_page import as_json as to_json

        typer.echo(json.dumps(to_json(findings, job.name, target), indent=1, ensure_ascii=False))
    else:
        from rich.console import Console

        from shardtune.cluster.lint_page import show

        show(Console(), findings)
    raise typer.Exit(int(has_errors(findings)))


@app.command(cls=ConfigCommand)
def scc(config: Config, override: Overrides = None, to: To = None) -> None:
    """Print what an administrator of OpenShift would apply for this job: SCC, role, ServiceAccount, binding.

    Allows what the job asks for beyond `restricted-v2` and nothing else. Prints a comment where that admits the job.

    Exit codes: 0; 2 invalid input.
    """
    import yaml

    from shardtune.cluster.lint_subject import Subject
    from shardtune.cluster.openshift import beyond_restricted, render_scc

    resolved, target = _load(config, override, to)
    job = _job(resolved, config, None)
    pod = Subject(job, target, _manifests(job, target)).pods[0]
    objects = render_scc(job, pod)
    if not objects:
        typer.echo("# restricted-v2 admits this job: nothing has to be applied.")
        return
    asked = beyond_restricted(pod)
    typer.echo(f"# For an administrator (oc apply -f). The job asks for: {', '.join(asked)}.")
    if "capability IPC_LOCK" in asked and "user id 0" not in asked:
        typer.echo("# IPC_LOCK does nothing for a user other than root: memlock must come from the container runtime.")
    typer.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)


def _load(config: Path, override: list[str] | None, to: str | None) -> tuple[ResolvedConfig, str]:
    from typing import get_args

    from shardtune.config import load_config
    from shardtune.config.cluster_schema import Target
    from shardtune.errors import UserInputError

    resolved = load_config(config, override or (), cluster_profile=True)
    target, known = to or resolved.config.cluster.target, get_args(Target)
    if target is None:
        raise UserInputError("Where does the job go?", fix=f"Add --to or set cluster.target: {', '.join(known)}.")
    if target not in known:
        raise UserInputError(f"--to is '{target}'.", fix=f"Give one of {', '.join(known)}.")
    return resolved, target


def _plan(resolved: ResolvedConfig) -> Plan | None:
    """What the run needs, where the GPUs are named and the model's files are on this machine."""
    from shardtune.cli.plan import plan_of
    from shardtune.errors import UserInputError

    cluster = resolved.config.cluster
    if cluster.gpu is None or not cluster.gpus_per_node or cluster.command:
        return None
    from shardtune.launch.named_paths import check_inputs

    try:
        check_inputs(resolved.config)
    except UserInputError:  # paths of the container: lint says that memory was not checked
        return None
    return plan_of(resolved, gpus=f"{cluster.gpus_per_node}x{cluster.gpu}", nodes=cluster.nodes)


def _job(resolved: ResolvedConfig, config: Path, plan: Plan | None) -> ClusterJob:
    from shardtune.cluster.spec import make_job

    return make_job(resolved, config, plan)


def _manifests(job: ClusterJob, target: str) -> Manifests | None:
    from shardtune.cluster.render_job import render_job

    return render_job(job) if target == "job" else None
