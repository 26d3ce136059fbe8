"""How does a job start where a command starts it? Slurm's sbatch, Run:ai's CLI, a container on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from shardtune.errors import ShardtuneError, UserInputError

if TYPE_CHECKING:
    from rich.console import Console

    from shardtune.cli.cluster_job import DescribedJob
    from shardtune.cluster.render_container import ContainerRun
    from shardtune.cluster.spec import ClusterJob


def submit_by_command(
    console: Console, described: DescribedJob, volumes: Sequence[str], *, dry_run: str | None, print_script: bool,
    output: str | None,
) -> None:  # fmt: skip
    """Args:
    volumes: CLAIM=FOLDER, for a container here.
    """
    if output is not None:
        raise UserInputError(f"--to {described.target} has no manifests to write.", fix="Use --print.")
    if dry_run == "server":
        raise UserInputError(
            f"--to {described.target} sends nothing to an API server that could check it.", fix="Use --dry-run client."
        )
    only_show = print_script or dry_run == "client"
    by_target = {"slurm": _slurm, "runai": _runai}
    if described.target in by_target:
        by_target[described.target](console, described, only_show=only_show, show=print_script)
    else:
        _container(console, described, volumes, only_show=only_show, show=print_script)


def _slurm(console: Console, described: DescribedJob, *, only_show: bool, show: bool) -> None:
    from shardtune.cluster.render_slurm import render_slurm
    from shardtune.terminal import say

    script = render_slurm(described.job)
    if only_show:
        print(script if show else "", end="")
        return
    if shutil.which("sbatch") is None:
        raise UserInputError("There is no command `sbatch` here.", fix="Submit on a login node of the cluster.")
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ShardtuneError("`sbatch` refused the job.", why=done.stderr.strip(), fix="Correct cluster.sbatch.")
    say(console, "done", f"Slurm job {done.stdout.strip()} is queued.", "bold green")
    say(console, "next", f"squeue -j {done.stdout.strip()}")


def _runai(console: Console, described: DescribedJob, *, only_show: bool, show: bool) -> None:
    from shardtune.cluster.api import connect
    from shardtune.cluster.render_runai import (
        namespace,
        namespace_warning,
        required_project,
        runai_argv,
        runai_support,
    )
    from shardtune.cluster.runai_cli import RunaiCli
    from shardtune.cluster.shell_script import command_script
    from shardtune.cluster.submit import submit_beside
    from shardtune.terminal import say

    job = described.job
    generation = job.settings.runai_submit
    assert generation != "manifest"  # that has a kind
    argv, support, where = runai_argv(job, generation), runai_support(job), namespace(job)
    project, warning = required_project(job), namespace_warning(job)
    if warning:
        say(console, "warning", warning, "yellow")
    if only_show:
        script = command_script(
            support, argv, name=job.name, project=project, namespace=where, context=job.settings.context,
            warning=warning,
        )  # fmt: skip
        print(script if show else "", end="")
        return
    runai = RunaiCli(project)
    runai.whoami()  # before anything is created
    said = submit_beside(connect(job.settings.context, where), support, lambda: runai.submit(argv))
    say(console, "done", said.strip() or f"{job.name} is submitted.", "bold green")
    names = " ".join(f"{one['kind'].lower()}/{one['metadata']['name']}" for one in support)
    if names:
        say(
            console, "notice", f"Run:ai does not delete what was made beside the job: kubectl delete -n {where} {names}"
        )
    say(console, "next", f"runai training pytorch logs {job.name} --project {project} --follow")


def _container(
    console: Console, described: DescribedJob, volumes: Sequence[str], *, only_show: bool, show: bool
) -> None:
    from shardtune.cluster.render_container import check_secrets
    from shardtune.terminal import say

    job = described.job
    if only_show:
        file = Path.cwd() / f"{job.name}-run.yaml"
        run = _container_run(described, volumes, file)
        if show:
            write = [
                f"cat > {shlex.quote(str(file))} <<'END_OF_CONFIG'",
                (job.config or "").rstrip("\n"),
                "END_OF_CONFIG",
            ]
            print("\n".join(["#!/bin/sh", "set -eu", *(write if job.config else ()), shlex.join(run.argv)]))
        return
    if shutil.which(described.target) is None:
        raise UserInputError(f"There is no command `{described.target}` here.", fix="Install it, or use --print.")
    check_secrets(job, os.environ)
    with tempfile.TemporaryDirectory(prefix="shardtune-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(job.config or "", encoding="utf-8")
        run = _container_run(described, volumes, file)
        if run.left_out:
            say(console, "notice", f"without effect in one container: {', '.join(run.left_out)}")
        raise typer.Exit(subprocess.run(run.argv, check=False).returncode)


def _container_run(described: DescribedJob, volumes: Sequence[str], file: Path) -> ContainerRun:
    from shardtune.cluster.render_container import render_container

    config = file if described.job.config is not None else None
    engine: Literal["docker", "podman"] = "docker" if described.target == "docker" else "podman"
    return render_container(described.job, engine, folders_of(described.job, volumes), config)


def folders_of(job: ClusterJob, volumes: Sequence[str]) -> dict[str, Path]:
    """The folder of each claim, from `CLAIM=FOLDER`."""
    folders: dict[str, Path] = {}
    claims = {volume.claim for volume in job.settings.volumes}
    for word in volumes:
        claim, equals, folder = word.partition("=")
        if equals and claim not in claims:
            known = ", ".join(sorted(claims)) or "none"
            raise UserInputError(f"--volume names the claim '{claim}'; the job has {known}.", fix="Correct its name.")
        if not equals or not Path(folder).is_dir():
            raise UserInputError(f"--volume '{word}' names no folder that is here.", fix="Write CLAIM=FOLDER.")
        folders[claim] = Path(folder).resolve()
    return folders
