"""`shardtune pull NAME`: how do a run's reports and its adapter come back from the cluster?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import Context, JobName, Namespace

_NAMED = 5


def pull(
    name: JobName,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Where to put it; default: runs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Checkpoints too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are here.")] = False,
    folder: Annotated[
        str | None,
        typer.Option("--folder", metavar="PATH", help="The run's folder in the container; default: the job's own."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Fetch a run's folder (reports, metrics, the adapter in final/) from its volume, through a pod.

    A running pod of the job is used, or a small one that mounts the volumes read-only and is deleted afterwards.
    """
    from shardtune.cluster.api import connect
    from shardtune.cluster.pull import pull as pull_run
    from shardtune.terminal import count, size

    found = pull_run(connect(context, namespace), name, to, everything=everything, force=force, run_folder=folder)
    print(f"{count(found.files, 'file')}, {size(found.bytes)} → {found.folder}")
    for names, why in ((found.kept, "here already, kept (--force overwrites)"), (found.skipped, "links, not fetched")):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            print(f"notice    {why}: {', '.join(names[:_NAMED])}{more}", file=sys.stderr)
    if found.changed_meanwhile:
        print("notice    the run wrote while it was read: pull again for the last lines", file=sys.stderr)
    print(f"next      shardtune report {found.folder}")
