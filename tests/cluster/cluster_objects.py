"""Objects as controllers write them, for tests of what we make of them."""

from __future__ import annotations

import uuid
from typing import Any

LABELS = {"app.kubernetes.io/managed-by": "shardtune", "app.kubernetes.io/instance": "ft"}
SELECTORS = {
    "Job": "batch.kubernetes.io/job-name", "JobSet": "jobset.sigs.k8s.io/jobset-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name", "PyTorchJob": "training.kubeflow.org/job-name",
}  # fmt: skip
VERSIONS = {
    "Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
}  # fmt: skip
PLURALS = {"Job": "jobs", "JobSet": "jobsets", "TrainJob": "trainjobs", "PyTorchJob": "pytorchjobs"}
CREATED = "2026-09-01T10:00:00Z"


def template(**spec: Any) -> dict[str, Any]:
    container = {
        "name": "trainer", "image": "registry.example/shardtune:1",
        "volumeMounts": [{"name": "pvc-runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "pvc-runs", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    return {"metadata": {"labels": LABELS}, "spec": {"containers": [container], "volumes": volumes, **spec}}


def workload(
    kind: str = "Job", *conditions: tuple[str, str], nodes: int = 2, name: str = "ft", suspend: bool = False,
    queue: str | None = None, **status: Any,
) -> dict[str, Any]:  # fmt: skip
    """A job with conditions that are True, as (type, message)."""
    jobs = {"completions": nodes, "parallelism": nodes, "template": template()}
    spec: dict[str, Any] = {**jobs, "suspend": suspend}
    if kind == "PyTorchJob":
        master, worker = ({"replicas": count, "template": template()} for count in (1, nodes - 1))
        spec = {"runPolicy": {"suspend": suspend}, "pytorchReplicaSpecs": {"Master": master, "Worker": worker}}
    if kind == "JobSet":
        spec = {"suspend": suspend, "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": jobs}}]}
    if kind == "TrainJob":
        spec = {"suspend": suspend, "trainer": {"numNodes": nodes}, "runtimeRef": {"name": "ft-runtime"}}
    found = [
        {"type": one, "status": "True", "reason": one, "message": message, "lastTransitionTime": "2026-09-01T11:00:00Z"}
        for one, message in conditions
    ]
    labels = {**LABELS, "app.kubernetes.io/instance": name}
    if queue:
        labels["kueue.x-k8s.io/queue-name"] = queue
    return {
        "apiVersion": VERSIONS[kind], "kind": kind,
        "metadata": {
            "name": name, "namespace": "ml", "uid": f"uid-of-{name}", "creationTimestamp": CREATED, "labels": labels,
            "annotations": {"shardtune.dev/run-folder": f"/runs/{name}"},
        },
        "spec": spec, "status": {"conditions": found, **status},
    }  # fmt: skip


def pod(
    rank: int = 0, phase: str = "Running", *, kind: str = "Job", job: str = "ft", name: str | None = None,
    exit_code: int | None = None, reason: str = "Error", restarts: int = 0, waiting: tuple[str, str] | None = None,
    unschedulable: str = "", created: str = CREATED, finished: str = "2026-09-01T10:30:00Z", attempt: int | None = None,
    init_exit_code: int | None = None, evicted: str = "",
) -> dict[str, Any]:  # fmt: skip
    labels = {**LABELS, SELECTORS[kind]: job}
    if kind == "PyTorchJob":
        labels["training.kubeflow.org/replica-type"] = "worker" if rank else "master"
        labels["training.kubeflow.org/replica-index"] = str(rank - 1 if rank else 0)
    else:
        labels["batch.kubernetes.io/job-completion-index"] = str(rank)
    if attempt is not None:
        labels["jobset.sigs.k8s.io/restart-attempt"] = str(attempt)
    ended = {"terminated": {"exitCode": exit_code or 0, "reason": reason, "finishedAt": finished}}
    state: dict[str, Any] = {"running": {"startedAt": CREATED}}
    if waiting:
        state = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    elif phase in ("Succeeded", "Failed"):
        state = ended
    status: dict[str, Any] = {"phase": phase, "conditions": []}
    if phase != "Pending" or waiting:
        status["startTime"] = CREATED
        image = "registry.example/shardtune:1"
        status["containerStatuses"] = [
            {"name": "trainer", "image": image, "restartCount": restarts, "state": state,
             "lastState": ended if restarts else {}},
        ]  # fmt: skip
    if unschedulable:
        status["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unschedulable}
        ]
    if init_exit_code is not None:
        over = {"terminated": {"exitCode": init_exit_code, "reason": "Error", "finishedAt": finished}}
        status["initContainerStatuses"] = [{"name": "doctor", "state": over, "restartCount": 0}]
    if evicted:
        status |= {"reason": "Evicted", "message": evicted, "containerStatuses": []}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name or f"{job}-{rank}-{uuid.uuid4().hex[:5]}", "namespace": "ml", "uid": str(uuid.uuid4()),
            "labels": labels, "creationTimestamp": created,
        },
        "spec": {**template()["spec"], "terminationGracePeriodSeconds": 120}, "status": status,
    }  # fmt: skip


def event(about: dict[str, Any], reason: str, message: str, kind: str = "Warning") -> dict[str, Any]:
    meta = about["metadata"]
    return {
        "apiVersion": "v1", "kind": "Event", "type": kind, "reason": reason, "message": message,
        "lastTimestamp": "2026-09-01T10:01:00Z",
        "metadata": {"name": f"e-{uuid.uuid4().hex[:8]}", "namespace": "ml"},
        "involvedObject": {"kind": about["kind"], "name": meta["name"], "uid": meta["uid"]},
    }  # fmt: skip
