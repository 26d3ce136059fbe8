"""`shardtune describe NAME`: why is the job pending, or why did it fail?"""

from __future__ import annotations

import json
from dataclasses import asdict

from shardtune.cli.options import AsJson, Context, JobName, Namespace

_EVENTS = 12


def describe(name: JobName, namespace: Namespace = None, context: Context = None, as_json: AsJson = False) -> None:
    """Say in words why a job does not run, or why it failed, and what to do: from its pods and the cluster's events."""
    from rich.console import Console

    from shardtune.cli.jobs import age
    from shardtune.cluster.api import connect
    from shardtune.cluster.describe import describe as describe_job
    from shardtune.cluster.state import pod_state
    from shardtune.cluster.workloads import node_rank
    from shardtune.terminal import say

    found = describe_job(connect(context, namespace), name)
    status = found.status
    if as_json:
        print(json.dumps({**status.as_json(), "reasons": [asdict(one) for one in found.reasons]}, indent=1))
        return
    console = Console()
    say(console, "job", f"{status.name} ({status.kind} in namespace {status.namespace})")
    say(console, "state", f"{status.state}{f': {status.message}' if status.message else ''}")
    for pod in found.pods:
        where = pod["spec"].get("nodeName") or "no machine yet"
        say(console, f"node {node_rank(pod)}", f"{pod['metadata']['name']}: {pod_state(pod)} on {where}")
    for one in found.reasons:
        say(console, "reason", one.what, "bold red")
        if one.said and one.said not in one.what:
            say(console, "", f"Kubernetes says: {one.said}")
        if one.fix:
            say(console, "fix", one.fix)
    if not found.reasons and status.state in ("pending", "restarting"):
        say(console, "reason", "Nothing is wrong that the cluster tells of: it may just be starting.")
    for event in found.events[-_EVENTS:]:
        stamp = str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp"))
        about = event.get("involvedObject") or {}
        text = (
            f"{age(stamp)} ago, {about.get('kind')} {about.get('name')}: {event.get('reason')}: {event.get('message')}"
        )
        say(console, "event", text, "dim")
