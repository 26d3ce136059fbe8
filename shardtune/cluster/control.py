"""How is a job ended, suspended and continued? The field of each kind, and Kueue's own where a queue decides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ApiError
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.pod import JOB_LABEL
from shardtune.cluster.resources import CONFIG_MAP, SECRET, SERVICE, TRAINING_RUNTIME, Resource, resource_of
from shardtune.cluster.state import ENDED, JobStatus, job_status
from shardtune.cluster.workloads import MANAGED, Workload, find_workload, kueue_workload, pods_of
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.terminal import count

_POLL_SECONDS = 1.0
_SUPPORT = (CONFIG_MAP, SECRET, SERVICE, TRAINING_RUNTIME)


@dataclass(frozen=True)
class Deletion:
    """What `cancel` would delete: the job, and what belongs to it."""

    workload: Workload
    status: JobStatus
    pods: int
    support: tuple[tuple[Resource, Manifest], ...]
    grace_seconds: int

    def __str__(self) -> str:
        kind = self.workload.resource.kind
        beside = [f"{resource.kind} {one['metadata']['name']}" for resource, one in self.support]
        parts = [f"{kind} {self.workload.name} ({self.status.state})", count(self.pods, "pod"), *beside]
        return f"{', '.join(parts)} in namespace {self.workload.namespace}"


def deletion(cluster: Cluster, name: str) -> Deletion:
    workload = find_workload(cluster, name)
    pods = pods_of(cluster, workload)
    grace = [int(pod["spec"].get("terminationGracePeriodSeconds") or 30) for pod in pods]
    status = job_status(workload, pods)
    return Deletion(workload, status, len(pods), tuple(_support(cluster, workload)), max(grace, default=30))


def _support(cluster: Cluster, workload: Workload) -> Iterator[tuple[Resource, Manifest]]:
    """The objects that were made with the job, as far as they may be read."""
    for resource in _SUPPORT:
        try:
            selector = f"{JOB_LABEL}={workload.name},{MANAGED}"
            found = cluster.list_all(resource, namespace=workload.namespace, labels=selector)
        except ApiError as error:
            if error.status in (403, 404):
                continue
            raise
        for one in found:
            owners = one["metadata"].get("ownerReferences") or ()
            if not owners or any(owner.get("uid") == workload.uid for owner in owners):
                yield resource, one


def delete(cluster: Cluster, plan: Deletion) -> None:
    """Delete the job. What it owns goes with it; what has no owner (made by a pipeline) is deleted here."""
    workload = plan.workload
    cluster.delete(workload.resource, workload.name, workload.namespace, uid=workload.uid)
    for resource, one in plan.support:
        if one["metadata"].get("ownerReferences"):
            continue
        try:
            cluster.delete(resource, one["metadata"]["name"], workload.namespace, uid=one["metadata"]["uid"])
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def wait_until_gone(cluster: Cluster, plan: Deletion) -> None:
    """Until no pod of the job is left: they have their grace period to save.

    Raises:
        ShardtuneError: pods remain long after it, and are named.
    """
    deadline = time.monotonic() + plan.grace_seconds + 60
    while pods := pods_of(cluster, plan.workload):
        if time.monotonic() > deadline:
            names = [str(pod["metadata"]["name"]) for pod in pods]
            look = f"kubectl describe pod {names[0]}{cluster.options}"
            raise ShardtuneError(
                f"The job was deleted, but pods of it remain: {', '.join(names)}.",
                why="Their machines may not answer.",
                fix=f"Look at them: {look}. The cluster's administrator can remove them.",
            )
        time.sleep(_POLL_SECONDS)


def set_suspended(cluster: Cluster, name: str, suspend: bool) -> str:
    """Suspend a job, or continue it; what was done, in words.

    Raises:
        UserInputError: it has ended, or is in that state already.
    """
    workload = find_workload(cluster, name)
    kueue = kueue_workload(cluster, workload)
    status = job_status(workload, pods_of(cluster, workload), kueue)
    if status.state in ENDED:
        raise UserInputError(f"The job '{name}' has ended ({status.state}).", fix="Submit it again under another name.")
    if kueue is not None:
        return _set_active(cluster, workload, kueue, not suspend)
    if workload.queue is not None:
        raise UserInputError(
            f"The job '{name}' is managed by Kueue (queue {workload.queue}), and its Workload cannot be read.",
            why="Kueue resets the job's own field.",
            fix="Ask for permission to get and patch workloads.kueue.x-k8s.io.",
        )
    if workload.suspended == suspend:
        raise UserInputError(
            f"The job '{name}' is {'suspended already' if suspend else f'not suspended: it is {status.state}'}."
        )
    cluster.patch(workload.resource, name, workload.suspend_patch(suspend), workload.namespace)
    return _done(cluster, workload, suspend)


def _set_active(cluster: Cluster, workload: Workload, kueue: Manifest, active: bool) -> str:
    """Kueue starts and stops the job by itself: what it obeys is `active` of its Workload."""
    if bool((kueue.get("spec") or {}).get("active", True)) == active:
        state = "in its queue or running" if active else "suspended already"
        raise UserInputError(f"The job '{workload.name}' is {state}.")
    name = str(kueue["metadata"]["name"])
    cluster.patch(resource_of(kueue), name, {"spec": {"active": active}}, workload.namespace)
    return f"{_done(cluster, workload, not active)} Through Kueue's Workload {name}."


def _done(cluster: Cluster, workload: Workload, suspend: bool) -> str:
    kind = f"{workload.resource.kind} {workload.name}"
    if suspend:
        command = f"shardtune resume {workload.name}{cluster.options}"
        return f"{kind} is suspended: its pods get SIGTERM, save a checkpoint and end. `{command}` continues it."
    return f"{kind} continues: its pods are created again, and the run resumes from its checkpoint."
