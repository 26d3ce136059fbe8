"""Which jobs are on the cluster, and which pods are theirs? The same questions for every kind."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ApiError
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.pod import KUEUE_QUEUE
from shardtune.cluster.resources import (
    JOB,
    JOBSET,
    KUEUE,
    NAMESPACE,
    POD,
    PYTORCHJOB,
    TRAINING_RUNTIME,
    TRAINJOB,
    WORKLOADS,
    Resource,
    kueue_workloads,
)  # fmt: skip
from shardtune.errors import UserInputError

MANAGED = "app.kubernetes.io/managed-by=shardtune"
_POD_SELECTORS = {
    JOB.kind: "batch.kubernetes.io/job-name",
    JOBSET.kind: "jobset.sigs.k8s.io/jobset-name",
    TRAINJOB.kind: "jobset.sigs.k8s.io/jobset-name",
    PYTORCHJOB.kind: "training.kubeflow.org/job-name",
}
_INDEX = "batch.kubernetes.io/job-completion-index"
_REPLICA_TYPE, _REPLICA_INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"


@dataclass(frozen=True)
class Workload:
    """A job on the cluster: the object whose controller makes its pods."""

    resource: Resource
    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.manifest["metadata"]["uid"])

    @property
    def spec(self) -> Manifest:
        return self.manifest.get("spec") or {}

    @property
    def status(self) -> Manifest:
        return self.manifest.get("status") or {}

    @property
    def annotations(self) -> dict[str, str]:
        return self.manifest["metadata"].get("annotations") or {}

    @property
    def labels(self) -> dict[str, str]:
        return self.manifest["metadata"].get("labels") or {}

    @property
    def queue(self) -> str | None:
        return self.labels.get(KUEUE_QUEUE)

    @property
    def suspended(self) -> bool:
        return bool((self.spec.get("runPolicy") or {}).get("suspend") if self.is_pytorch else self.spec.get("suspend"))

    @property
    def is_pytorch(self) -> bool:
        return self.resource.kind == PYTORCHJOB.kind

    def suspend_patch(self, suspend: bool) -> Manifest:
        return {"spec": {"runPolicy": {"suspend": suspend}} if self.is_pytorch else {"suspend": suspend}}

    @property
    def nodes(self) -> int:
        """How many pods it has when all of it runs."""
        if self.is_pytorch:
            specs = self.spec.get("pytorchReplicaSpecs") or {}
            return sum(int(one.get("replicas") or 1) for one in specs.values())
        if self.resource.kind == TRAINJOB.kind:
            return int((self.spec.get("trainer") or {}).get("numNodes") or 1)
        if self.resource.kind == JOBSET.kind:
            jobs = self.spec.get("replicatedJobs") or ()
            return sum(int(one.get("replicas") or 1) * _parallelism(one["template"]["spec"]) for one in jobs)
        return _parallelism(self.spec)


def _parallelism(spec: Manifest) -> int:
    return int(spec.get("completions") or spec.get("parallelism") or 1)


def find_workload(cluster: Cluster, name: str) -> Workload:
    """The job of that name in the cluster's namespace, whatever its kind.

    Raises:
        UserInputError: there is none, or it is not one of ours.
    """
    found, refused = look_up(cluster, name)
    ours = [one for one in found if one.labels.get("app.kubernetes.io/managed-by") == "shardtune"]
    if ours:
        return ours[0]
    if found:
        raise UserInputError(
            f"{found[0].resource.kind} '{name}' in namespace '{cluster.namespace}' was not made by shardtune.",
            fix="Use kubectl for it.",
        )
    if refused is not None:
        raise refused
    check_namespace(cluster)
    elsewhere = _namespaces_with(cluster, name)
    if elsewhere:
        raise UserInputError(
            f"There is no job '{name}' in namespace '{cluster.namespace}', but in {', '.join(elsewhere)}.",
            fix=f"Name it: -n {elsewhere[0]}.",
        )
    raise UserInputError(
        f"There is no job '{name}' in namespace '{cluster.namespace}' (context '{cluster.access.context}').",
        fix=f"List them: shardtune jobs{cluster.options} (--all-namespaces for every namespace, "
        "--context for another cluster).",
    )


def check_namespace(cluster: Cluster) -> None:
    """Raise if the namespace does not exist: a list of what is in it is empty, and no error."""
    try:
        found = cluster.find(NAMESPACE, cluster.namespace)
    except ApiError as error:
        if error.status == 403:  # most users may not look
            return
        raise
    if found is None:
        raise UserInputError(
            f"The namespace '{cluster.namespace}' does not exist (context '{cluster.access.context}').",
            fix="Name one that does: --namespace.",
        )


def _namespaces_with(cluster: Cluster, name: str) -> list[str]:
    """Where else a job of that name is, as far as we may look."""
    found: dict[str, None] = {}
    for resource in WORKLOADS:
        try:
            items = cluster.list_all(resource, everywhere=True, labels=MANAGED, fields=f"metadata.name={name}")
        except ApiError:  # not installed, or not for us: it is only a hint
            continue
        found |= dict.fromkeys(str(one["metadata"]["namespace"]) for one in items)
    return list(found)


def look_up(cluster: Cluster, name: str) -> tuple[list[Workload], ApiError | None]:
    """What has that name, of every kind, and the first kind that we may not read, if any."""
    found: list[Workload] = []
    refused: ApiError | None = None
    for resource in WORKLOADS:
        try:
            manifest = cluster.find(resource, name)
        except ApiError as error:
            if error.status != 403:
                raise
            refused = refused or error
            continue
        if manifest is not None:
            found.append(Workload(resource, manifest))
    return found, refused


def list_workloads(cluster: Cluster, *, everywhere: bool) -> tuple[list[Workload], list[ApiError]]:
    """All jobs that shardtune made, newest first, and what could not be read. A kind that is not installed has none."""
    found: list[Workload] = []
    refused: list[ApiError] = []
    for resource in WORKLOADS:
        try:
            items = cluster.list_all(resource, everywhere=everywhere, labels=MANAGED)
        except ApiError as error:
            if error.missing_kind:
                continue
            if error.status != 403:
                raise
            refused.append(error)
            continue
        found += [Workload(resource, one) for one in items if not _belongs_to_another(one)]
    if refused and len(refused) == len(WORKLOADS):
        raise refused[0]
    return sorted(found, key=lambda one: str(one.manifest["metadata"].get("creationTimestamp")), reverse=True), refused


def _belongs_to_another(manifest: Manifest) -> bool:
    """Such as the JobSet of a TrainJob, or the Jobs of a JobSet."""
    return any(owner.get("controller") for owner in manifest["metadata"].get("ownerReferences") or ())


def pods_of(cluster: Cluster, workload: Workload) -> list[Manifest]:
    """Its pods, also those of earlier attempts, oldest first."""
    selector = f"{_POD_SELECTORS[workload.resource.kind]}={workload.name}"
    found = cluster.list_all(POD, namespace=workload.namespace, labels=selector)
    return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))


def all_pods(cluster: Cluster, *, everywhere: bool) -> list[Manifest]:
    """The pods of all jobs at once, for lists."""
    found = cluster.list_all(POD, everywhere=everywhere, labels=MANAGED)
    return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))


def belongs_to(pod: Manifest, workload: Workload) -> bool:
    key = _POD_SELECTORS[workload.resource.kind]
    metadata = pod["metadata"]
    same = metadata.get("namespace") == workload.namespace
    return same and (metadata.get("labels") or {}).get(key) == workload.name


def node_rank(pod: Manifest) -> int:
    """Which node of the job a pod is: the master of a PyTorchJob is 0, its worker 0 is 1."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    index = labels.get(_INDEX) or (metadata.get("annotations") or {}).get(_INDEX)
    if index is None and _REPLICA_TYPE in labels:
        return int(labels.get(_REPLICA_INDEX) or 0) + int(labels[_REPLICA_TYPE].lower() == "worker")
    return int(index or 0)


def newest_by_rank(pods: Iterable[Manifest]) -> dict[int, Manifest]:
    """The pod that is now each node; `pods` oldest first."""
    return dict(sorted({node_rank(pod): pod for pod in pods}.items()))


def main_container(pod: Manifest) -> str:
    """The one that trains: the first that is not a site's sidecar, by the names that kinds give it."""
    names = [str(one["name"]) for one in pod["spec"]["containers"]]
    return next((name for name in names if name in ("trainer", "pytorch", "node")), names[0])


def kueue_workload(cluster: Cluster, workload: Workload) -> Manifest | None:
    """Kueue's own object for a job that has a queue; None if there is none or it may not be read."""
    version = cluster.preferred_version(KUEUE) if workload.queue else None
    if version is None:
        return None
    try:
        found = cluster.list_all(
            kueue_workloads(version), namespace=workload.namespace, labels=f"{KUEUE}/job-uid={workload.uid}"
        )
    except ApiError as error:
        if error.status in (403, 404):
            return None
        raise
    return found[0] if found else None


def pod_template_of(cluster: Cluster, workload: Workload) -> Manifest:
    """The pod template of a job on the cluster, for a pod that sees the same volumes.

    Raises:
        ApiError: the TrainingRuntime of a TrainJob is gone.
    """
    if workload.is_pytorch:
        specs = workload.spec["pytorchReplicaSpecs"]
        found = (specs.get("Master") or next(iter(specs.values())))["template"]
    elif workload.resource.kind == JOBSET.kind:
        found = workload.spec["replicatedJobs"][0]["template"]["spec"]["template"]
    elif workload.resource.kind == TRAINJOB.kind:
        found = _of_runtime(cluster, workload)
    else:
        found = workload.spec["template"]
    template: Manifest = copy.deepcopy(found)
    return template


def _of_runtime(cluster: Cluster, workload: Workload) -> Manifest:
    runtime = cluster.get(TRAINING_RUNTIME, str(workload.spec["runtimeRef"]["name"]), workload.namespace)
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    node = next((one for one in jobs if one.get("name") == "node"), jobs[0])
    template: Manifest = copy.deepcopy(node["template"]["spec"]["template"])
    image = (workload.spec.get("trainer") or {}).get("image")
    if image:
        for container in template["spec"]["containers"]:
            container["image"] = image if container["name"] == "node" else container["image"]
    return template
