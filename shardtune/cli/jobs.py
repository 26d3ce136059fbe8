"""`shardtune jobs` and `shardtune status NAME`: which jobs are on the cluster, and how are they doing?"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import AsJson, Context, JobName, Namespace

if TYPE_CHECKING:
    from shardtune.cluster.api import Cluster
    from shardtune.cluster.state import JobStatus

_STYLES = {"running": "green", "succeeded": "bold green", "failed": "bold red", "restarting": "yellow"}
_WIDE = 110  # columns that leave room for messages
_UNLIMITED = 10_000


def jobs(
    namespace: Namespace = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Those of every namespace.")] = False,
    context: Context = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs that shardtune submitted to a cluster, of every kind."""
    from shardtune.cluster.api import connect
    from shardtune.cluster.state import job_status
    from shardtune.cluster.workloads import all_pods, belongs_to, check_namespace, kueue_workload, list_workloads

    cluster = connect(context, namespace)
    workloads, refused = list_workloads(cluster, everywhere=all_namespaces)
    pods = all_pods(cluster, everywhere=all_namespaces) if workloads else []
    found = [
        job_status(one, [pod for pod in pods if belongs_to(pod, one)], kueue_workload(cluster, one))
        for one in workloads
    ]
    if refused:
        kinds = ", ".join(dict.fromkeys(error.what.removeprefix("You have ").rstrip(".") for error in refused))
        print(f"notice    not everything is shown: {kinds}", file=sys.stderr)
    if as_json:
        print(json.dumps([one.as_json() for one in found], indent=1))
    elif not found:
        if not all_namespaces:
            check_namespace(cluster)
        where = "in any namespace" if all_namespaces else f"in namespace '{cluster.namespace}'"
        print(f"No jobs of shardtune {where} (context '{cluster.access.context}').")
    else:
        _print_table(cluster, found, with_namespace=all_namespaces)


def _print_table(cluster: Cluster, found: list[JobStatus], *, with_namespace: bool) -> None:
    """One line for each job: unwrapped where there is no terminal, without messages on a narrow one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardtune.terminal import say, width_of

    console = Console()
    width = width_of(console)
    with_message = width is None or width >= _WIDE
    table = Table(box=None, pad_edge=False)
    titles = ["NAMESPACE"] if with_namespace else []
    for title in (*titles, "NAME", "KIND", "STATE", "NODES", "RESTARTS", "AGE", *(["MESSAGE"] if with_message else [])):
        table.add_column(title, no_wrap=title != "MESSAGE", overflow="fold")
    for one in found:
        cells = [*([one.namespace] if with_namespace else []), *_cells(one), *([_message(one)] if with_message else [])]
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in cells))
    # Names are never cut: a terminal that is too narrow even for them wraps the line.
    wide = console if width is not None and with_message else Console(width=_UNLIMITED)
    with wide.capture() as printed:
        wide.print(table)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))
    if not with_message and any(map(_message, found)):
        named = next(one for one in found if _message(one))
        say(console, "next", f"shardtune status {named.name}{cluster.options_for(named.namespace)} says more")


def _cells(one: JobStatus) -> list[str]:
    from shardtune.cluster.state import ENDED

    nodes = str(one.nodes) if one.state in ENDED else f"{one.ready}/{one.nodes}"
    return [one.name, one.kind, one.state, nodes, str(one.restarts), age(one.created)]


def _message(one: JobStatus) -> str:
    return " ".join((str(one.failure) if one.failure else one.message).split())


def status(name: JobName, namespace: Namespace = None, context: Context = None, as_json: AsJson = False) -> None:
    """Show how one job is doing.

    Exit codes: 0, or 1 if the job has failed; 2 if there is none.
    """
    from rich.console import Console

    from shardtune.cluster.api import connect
    from shardtune.cluster.state import job_status
    from shardtune.cluster.workloads import find_workload, kueue_workload, pods_of
    from shardtune.terminal import say

    cluster = connect(context, namespace)
    workload = find_workload(cluster, name)
    found = job_status(workload, pods_of(cluster, workload), kueue_workload(cluster, workload))
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
        raise typer.Exit(int(found.state == "failed"))
    console = Console()
    why = f": {found.message}" if found.message else ""
    say(console, "job", f"{found.name} ({found.kind} in namespace {found.namespace}, context {cluster.access.context})")
    say(console, "state", f"{found.state}{why}", _STYLES.get(found.state, "bold"))
    say(console, "nodes", f"{found.ready} of {found.nodes} running or done, {found.restarts} restarts")
    say(console, "since", " · ".join(_times(found)))
    if found.failure:
        say(console, "failure", str(found.failure), "bold red")
    if found.state in ("pending", "queued", "failed", "restarting"):
        say(console, "next", f"shardtune describe {found.name}{cluster.options} says why")
    if found.state == "suspended":
        say(console, "next", f"shardtune resume {found.name}{cluster.options} continues it")
    raise typer.Exit(int(found.state == "failed"))


def _times(found: JobStatus) -> list[str]:
    named = (("created", found.created), ("started", found.started), ("ended", found.ended))
    return [f"{word} {when} ({age(when)} ago)" for word, when in named if when]


def age(stamp: str) -> str:
    """How long ago, as kubectl says it: `45s`, `12m`, `3h12m`, `2d4h`."""
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds())
    except ValueError:
        return "?"
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m" if minutes else f"{max(0, seconds)}s"
