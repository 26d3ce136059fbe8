"""A TrainJob of Kubeflow Trainer 2.x, and the TrainingRuntime of its own that holds the whole pod.

Most fields of a pod cannot be set from a TrainJob, and those that can are in another place in every release. A
runtime beside the job has them all, and is the same in every release but for what `_Release` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import DOCTOR, KUEUE_QUEUE, labels, metadata, pod_template, support_objects
from shardtune.cluster.render_job import seconds
from shardtune.cluster.render_jobset import jobset_spec, master_address
from shardtune.cluster.spec import MASTER_PORT, ClusterJob
from shardtune.errors import UserInputError

API_VERSION = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"  # on the Job template: these pods are the trainer's
COMPLETION_INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_CONTAINER = "node"
_NEWEST = "2.3"


@dataclass(frozen=True)
class _Release:
    """What a release of Trainer can do."""

    deadline: bool  # TrainJob.spec.activeDeadlineSeconds
    volcano: bool
    env_injection: bool  # PET_* in other containers than `node`


_RELEASES = {
    "2.0": _Release(deadline=False, volcano=False, env_injection=False),
    "2.1": _Release(deadline=False, volcano=True, env_injection=False),
    "2.2": _Release(deadline=True, volcano=True, env_injection=False),
    _NEWEST: _Release(deadline=True, volcano=True, env_injection=True),
}


def render_trainjob(job: ClusterJob) -> Manifests:
    """Trainer makes a JobSet of the runtime; pods are called `<name>-node-0-<index>.<name>` and have PET_*.

    Raises:
        UserInputError: a setting that this kind, or this release of it, cannot express.
    """
    settings = job.settings
    name = _NEWEST if settings.trainer_release == "auto" else settings.trainer_release
    release = _RELEASES[name]
    if settings.keep_hours is not None:
        raise UserInputError(
            "A TrainJob cannot delete itself (cluster.keep_hours).",
            why="It has no such field, and a failed job whose JobSet deletes itself is started again by Trainer.",
            fix="Remove cluster.keep_hours and delete the job with `shardtune cancel`, or use --to jobset.",
        )
    template = pod_template(job, container=_CONTAINER)
    runtime = _runtime(job, template, release, name)
    # `trainer` must be there: without it Trainer injects no PET_*, and every pod would train alone. The number of
    # processes must be in it: what Trainer counts itself depends on the release and on how GPUs are called.
    spec: Manifest = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {"numNodes": job.nodes, "numProcPerNode": job.nproc},
    }
    if settings.max_hours is not None and release.deadline:
        spec["activeDeadlineSeconds"] = seconds(settings.max_hours)
    workload: Manifest = {"apiVersion": API_VERSION, "kind": "TrainJob", "metadata": metadata(job), "spec": spec}
    if settings.queue:
        workload["metadata"]["labels"][KUEUE_QUEUE] = settings.queue
    return Manifests(workload, (*support_objects(job), runtime), {"node": template})


def release_of_crd(crd: Manifest) -> str:
    """The release of Trainer (`2.0` … `2.3`) whose CRD of TrainJob this is. A newer one counts as the newest known.

    Raises:
        UserInputError: it is not one of TrainJob's.
    """
    versions = crd.get("spec", {}).get("versions", [])
    fields: dict[str, Any] = {}
    for version in versions:
        if version.get("name") == "v1alpha1":
            schema = version.get("schema", {}).get("openAPIV3Schema", {})
            fields = schema.get("properties", {}).get("spec", {}).get("properties", {})
    if "podSpecOverrides" in fields:
        return "2.0"
    if "podTemplateOverrides" in fields:
        return "2.1"
    if "runtimePatches" in fields:
        return "2.3" if _names_field(fields["runtimePatches"], "terminationGracePeriodSeconds") else "2.2"
    found = crd.get("metadata", {}).get("name", "without a name")
    raise UserInputError(
        f"The release of Kubeflow Trainer cannot be read from the CRD '{found}'.",
        why="Trainer 2.x has podSpecOverrides, podTemplateOverrides or runtimePatches in its TrainJob v1alpha1; this "
        "one has none of them.",
        fix="Set cluster.trainer_release (2.0, 2.1, 2.2 or 2.3).",
    )


def _runtime(job: ClusterJob, template: Manifest, release: _Release, name: str) -> Manifest:
    torch: Manifest = {}
    doctor = next((one for one in template["spec"].get("initContainers", []) if one["name"] == DOCTOR), None)
    if doctor is not None and release.env_injection:
        torch["envInjection"] = {"targets": [{"jobName": "node", "containerNames": [DOCTOR]}]}
    elif doctor is not None:
        doctor["env"] = [*doctor.get("env", []), *_torch_env(job)]
    jobset = jobset_spec(job, template, deadline_in_job=not release.deadline)
    jobset["replicatedJobs"][0]["template"]["metadata"]["labels"][ANCESTOR_LABEL] = "trainer"
    spec: Manifest = {"mlPolicy": {"numNodes": job.nodes, "torch": torch}}
    policy = _pod_group_policy(job, template, release, name)
    if policy is not None:
        spec["podGroupPolicy"] = policy
    # A failed JobSet that is gone is made again by Trainer: never ttlSecondsAfterFinished in here.
    spec["template"] = {"metadata": {"labels": labels(job)}, "spec": jobset}
    return {"apiVersion": API_VERSION, "kind": "TrainingRuntime", "metadata": metadata(job), "spec": spec}


def _torch_env(job: ClusterJob) -> list[Manifest]:
    """What Trainer gives the container `node`, for an init container of a release that gives it nothing."""
    index = {"fieldRef": {"fieldPath": COMPLETION_INDEX_FIELD}}
    return [
        {"name": "PET_NNODES", "value": str(job.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(job.nproc)},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": master_address(job)},
        {"name": "PET_MASTER_PORT", "value": str(MASTER_PORT)},
    ]


def _pod_group_policy(job: ClusterJob, template: Manifest, release: _Release, name: str) -> Manifest | None:
    """Trainer makes the PodGroup, but leaves the scheduler of the pods as it is: a default scheduler ignores it."""
    gang = job.settings.gang_scheduling
    if gang == "none":
        return None
    if gang == "volcano":
        if not release.volcano:
            raise UserInputError(
                f"Kubeflow Trainer {name} cannot ask Volcano for gang scheduling.",
                why="Volcano came with Trainer 2.1.",
                fix="Set cluster.gang_scheduling: coscheduling, or use Kueue (cluster.queue) or --to pytorchjob.",
            )
        template["spec"].setdefault("schedulerName", "volcano")
    elif "schedulerName" not in template["spec"]:
        raise UserInputError(
            "cluster.gang_scheduling: coscheduling needs cluster.scheduler_name with a TrainJob.",
            why="Trainer makes the PodGroup, but the pods would go to the default scheduler, which ignores it.",
            fix="Set cluster.scheduler_name to the scheduler with the coscheduling plugin (its chart calls it "
            "scheduler-plugins-scheduler; default-scheduler where it replaces the default one).",
        )
    return {gang: {}}


def _names_field(schema: Any, field: str) -> bool:
    if isinstance(schema, dict):
        return field in schema.get("properties", {}) or any(_names_field(inner, field) for inner in schema.values())
    return False
