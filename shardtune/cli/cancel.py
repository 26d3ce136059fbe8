"""`shardtune cancel`, `suspend`, `resume`: how is a job ended, stopped for a while, continued?"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardtune.cli.options import Context, JobName, Namespace


def cancel(
    name: JobName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the pods are gone.")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Delete a job and what was made with it. Its files on volumes stay.

    The pods get SIGTERM and their grace period: a run saves a checkpoint.
    """
    from shardtune.cluster.api import connect
    from shardtune.cluster.control import delete, deletion, wait_until_gone
    from shardtune.errors import UserInputError

    cluster = connect(context, namespace)
    plan = deletion(cluster, name)
    if not yes:
        if not sys.stdin.isatty():
            raise UserInputError(f"This would delete {plan}.", fix="Confirm with --yes.")
        typer.confirm(f"Delete {plan}?", abort=True)
    delete(cluster, plan)
    print(f"Deleted {plan}.")
    if no_wait:
        return
    try:
        wait_until_gone(cluster, plan)
    except KeyboardInterrupt:
        print("The job is deleted; its pods are still ending.", file=sys.stderr)
        raise
    print("Its pods are gone. What the run wrote to volumes is still there.")


def suspend(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Stop a job for a while: its pods end with a checkpoint and free their GPUs."""
    _set_suspended(name, True, namespace, context)


def resume(name: JobName, namespace: Namespace = None, context: Context = None) -> None:
    """Continue a suspended job: its run resumes from the checkpoint."""
    _set_suspended(name, False, namespace, context)


def _set_suspended(name: str, suspended: bool, namespace: str | None, context: str | None) -> None:
    from shardtune.cluster.api import connect
    from shardtune.cluster.control import set_suspended

    print(set_suspended(connect(context, namespace), name, suspended))
