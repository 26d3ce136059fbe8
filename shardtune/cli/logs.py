"""`shardtune logs NAME`: what do all nodes of a job print?"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

from shardtune.cli.options import Context, JobName, Namespace

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def logs(
    name: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    node: Annotated[int | None, typer.Option("--node", metavar="N", min=0, help="One node only, by its rank.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only what is newer: 30s, 10m, 2h, 1d.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the logs of all pods of a job, each line with its node's rank.

    With -f through restarts of pods and lost connections, until the job ends.

    Exit codes: 0; with -f 1 if the job failed or was deleted; 2 invalid input.
    """
    from shardtune.cluster.api import connect
    from shardtune.cluster.logs import Line, read_logs
    from shardtune.cluster.logs import follow as follow_logs

    seconds = _seconds(since)
    cluster = connect(context, namespace)
    if not follow:
        for line in read_logs(cluster, name, node=node, since_seconds=seconds):
            _print(line.node, line.text, note=line.note)
        return
    for found in follow_logs(cluster, name, node=node, since_seconds=seconds):
        if isinstance(found, Line):
            _print(found.node, found.text, note=found.note)
            continue
        failure = f": {found.failure}" if found.failure else f": {found.message}" if found.message else ""
        print(f"The job {name} has {found.state}{failure}", file=sys.stderr)
        raise typer.Exit(int(found.state == "failed"))


def _seconds(since: str | None) -> int | None:
    from shardtune.errors import UserInputError

    if since is None:
        return None
    found = re.fullmatch(r"(\d+)([smhd]?)", since)
    if found is None or not int(found[1]):
        raise UserInputError(f"--since '{since}' is not a time.", fix="Write a number and a unit: 30s, 10m, 2h, 1d.")
    return int(found[1]) * _UNITS[found[2] or "s"]


def _print(node: int, text: str, *, note: bool) -> None:
    """A line on stdout; ours on stderr, so that a log in a file is the nodes' own."""
    stream = sys.stderr if note else sys.stdout
    prefix = f"[{node}]" if node >= 0 else "[-]"
    if note:
        text = f"-- {text}"
    if stream.isatty() and not os.environ.get("NO_COLOR") and node >= 0:
        prefix = f"\x1b[{_COLOURS[node % len(_COLOURS)]}m{prefix}\x1b[0m"
    try:
        print(f"{prefix} {text}", file=stream, flush=True)
    except BrokenPipeError:  # `shardtune logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit() from None
