"""How does a rendered job reach the cluster, whole or not at all?

Everything is tried on the server first (dry run). Then the objects beside the job are made, then the job, then they are
made its own. If anything fails on the way, what this call has made is deleted again; what could not be is named.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ApiError, ClusterError
from shardtune.cluster.controllers import expand
from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import SECRET_KEY
from shardtune.cluster.pod_plan import pod_manifest
from shardtune.cluster.resources import SECRET, TRAINJOB, Resource, resource_of
from shardtune.cluster.state import job_status
from shardtune.cluster.workloads import look_up, pods_of
from shardtune.errors import ShardtuneError, UserInputError

SUBMISSION = "shardtune.dev/submission"  # annotation: which call made an object, so that it deletes no other
_SECRET_BYTES = 32
_RUNTIME_FIRST = "must be created before the TrainJob"  # words of Trainer's webhook
_CACHE_SECONDS = 15.0


@dataclass
class _Object:
    """One object on its way; `uid` once the server has made it, `sent` once it may have."""

    resource: Resource
    manifest: Manifest
    sent: bool = False
    uid: str | None = None

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def __str__(self) -> str:
        return f"{self.resource.kind} {self.name}"


def check_name_free(cluster: Cluster, manifests: Manifests) -> None:
    """Raise if the job, or anything that is made with it, exists.

    Raises:
        UserInputError: says which, and in which state the job is.
    """
    found, _ = look_up(cluster, manifests.name)
    if found:
        workload = found[0]
        status = job_status(workload, pods_of(cluster, workload))
        ours = workload.labels.get("app.kubernetes.io/managed-by") == "shardtune"
        raise UserInputError(
            f"A job '{manifests.name}' exists already in namespace '{workload.namespace}': "
            f"{workload.resource.kind}, {status.state}.",
            why="" if ours else "It was not made by shardtune.",
            fix=f"Use another name (--name), or delete it first: shardtune cancel {manifests.name}{cluster.options}."
            if ours
            else "Use another name (--name).",
        )
    for manifest in manifests.support:
        resource, name = resource_of(manifest), str(manifest["metadata"]["name"])
        try:
            existing = cluster.find(resource, name)
        except ApiError as error:
            if error.status == 403:  # who may not read a Secret may still create it, and creating never overwrites
                continue
            raise
        if existing is not None:
            raise UserInputError(
                f"{resource.kind} '{name}' exists already in namespace '{cluster.namespace}', without the job "
                f"'{manifests.name}' that it would belong to.",
                fix=f"Use another name (--name), or delete it if it is not needed: kubectl delete "
                f"{resource.kind.lower()} {name}{cluster.options}.",
            )


def dry_run(cluster: Cluster, manifests: Manifests) -> Iterator[str]:
    """Try every object on the server, and the pods as Pods, because a CRD does not check the template inside it.

    Yields:
        What could not be tried, in words.

    Raises:
        ApiError: refused, in the server's words.
    """
    for manifest in manifests:
        try:
            # As it will be created, whose refusals are the clearer ones, and as a pipeline would apply it.
            cluster.create(manifest, dry_run=True)
            cluster.apply(manifest, dry_run=True)
        except ApiError as error:
            # Trainer's webhook wants the runtime first, and a dry run does not leave one.
            if manifest["kind"] != TRAINJOB.kind or _RUNTIME_FIRST not in error.message:
                raise
            yield "The TrainJob is checked when it is created: its TrainingRuntime has to exist first."
    by_role = {plan.role: plan for plan in expand(manifests)}  # those of a role differ only in their index
    for plan in by_role.values():
        try:
            cluster.create(pod_manifest(plan), dry_run=True)
        except ApiError as error:
            if error.status != 403 or 'cannot create resource "pods"' not in error.message:
                raise
            yield (
                "The pods were not tried as Pods, because you may not create any here; a mistake in them shows only "
                "when the job's controller creates them."
            )
            return


def submit(cluster: Cluster, manifests: Manifests) -> Manifest:
    """Create the job; the workload as the server made it.

    Objects are created, not applied: apply would quietly take over one of the same name that somebody made meanwhile.

    Raises:
        ShardtuneError: and then nothing of it is left, or the message names what is.
    """
    with _all_or_nothing(cluster, list(manifests)) as objects:
        workload = objects[-1]
        owner = {
            "apiVersion": workload.manifest["apiVersion"], "kind": workload.manifest["kind"], "name": workload.name,
            "uid": workload.uid, "controller": False, "blockOwnerDeletion": False,
        }  # fmt: skip
        for one in objects[:-1]:
            cluster.patch(one.resource, one.name, {"metadata": {"uid": one.uid, "ownerReferences": [owner]}})
        return cluster.get(workload.resource, workload.name)


def submit_beside(cluster: Cluster, support: Sequence[Manifest], send: Callable[[], str]) -> str:
    """Create what a job refers to, then have a command make the job itself; what the command said.

    Raises:
        ShardtuneError: as of `submit`, also where the command failed.
    """
    with _all_or_nothing(cluster, support):
        return send()


@contextmanager
def _all_or_nothing(cluster: Cluster, manifests: Sequence[Manifest]) -> Iterator[list[_Object]]:
    """Create objects, and delete them again if that, or what is done with them, fails."""
    token = secrets.token_hex(8)
    objects = [_Object(resource_of(one), _marked(one, token)) for one in manifests]
    hidden = [_fill_secret(one.manifest) for one in objects if one.resource == SECRET]
    try:
        for one in objects:
            one.sent = True
            one.uid = str(_create(cluster, one)["metadata"]["uid"])
        yield objects
    except ShardtuneError as error:
        raise _with_account(error, *_remove(cluster, objects, token), hidden) from None
    except BaseException:  # Ctrl-C
        _remove(cluster, objects, token)
        raise


def _create(cluster: Cluster, one: _Object) -> Manifest:
    """Trainer's webhook reads runtimes from a cache that learns of a new one a moment after the server has it."""
    deadline = time.monotonic() + _CACHE_SECONDS
    while True:
        try:
            return cluster.create(one.manifest)
        except ApiError as error:
            if one.resource != TRAINJOB or _RUNTIME_FIRST not in error.message or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _marked(manifest: Manifest, token: str) -> Manifest:
    found = copy.deepcopy(manifest)
    found["metadata"].setdefault("annotations", {})[SUBMISSION] = token
    return found


def _fill_secret(manifest: Manifest) -> str:
    """Make the nodes' shared secret. It is in no output, no file and no message."""
    value = secrets.token_hex(_SECRET_BYTES)
    manifest["stringData"] = {**manifest["stringData"], SECRET_KEY: value}
    return value


def _remove(cluster: Cluster, objects: Sequence[_Object], token: str) -> tuple[list[str], list[str]]:
    """Delete what this call made, the job first: what was deleted, and what could not be."""
    deleted, left = [], []
    for one in reversed(objects):
        if not one.sent:
            continue
        try:
            uid = one.uid or _uid_if_ours(cluster, one, token)
            if uid is not None:
                cluster.delete(one.resource, one.name, uid=uid)
                deleted.append(str(one))
        except ApiError as error:
            if error.status == 404 and one.uid:  # went with the job that owned it
                deleted.append(str(one))
            elif error.status not in (404, 409):  # 409: by now another object of that name
                left.append(str(one))
        except ClusterError:
            left.append(str(one))
    return deleted, left


def _uid_if_ours(cluster: Cluster, one: _Object, token: str) -> str | None:
    """Of an object whose creation was not confirmed: the answer may have been lost after it was made."""
    try:
        found = cluster.find(one.resource, one.name)
    except ApiError as error:
        if error.status == 403:
            return None
        raise
    made_by = ((found or {}).get("metadata", {}).get("annotations") or {}).get(SUBMISSION)
    return str(found["metadata"]["uid"]) if found is not None and made_by == token else None


def _with_account(
    error: ShardtuneError, deleted: Sequence[str], left: Sequence[str], hidden: Sequence[str]
) -> ShardtuneError:
    """The error with what became of the objects before it."""
    account = "Nothing was created."
    if deleted:
        account = f"What had been created was deleted again: {', '.join(deleted)}."
    if left:
        account = f"LEFT BEHIND, because deleting failed too: {', '.join(left)}. Delete it with kubectl."
    parts = [error.what, "\n".join(filter(None, (error.why, account))), error.fix]
    for value in hidden:
        parts = [part.replace(value, "…") for part in parts]
    return ClusterError(parts[0], why=parts[1], fix=parts[2])
