"""An Indexed Job of plain Kubernetes: no operator is needed. A headless Service gives its pods names."""

from __future__ import annotations

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import KUEUE_QUEUE, headless_service, metadata, pod_template, support_objects
from shardtune.cluster.spec import MASTER_PORT, ClusterJob
from shardtune.errors import UserInputError
from shardtune.run.exit_codes import OUT_OF_MEMORY, PREEMPTED, WRONG_INPUT


def render_job(job: ClusterJob) -> Manifests:
    """Pods are called `<name>-<index>.<name>`; JOB_COMPLETION_INDEX is the node rank.

    Raises:
        UserInputError: a setting that this kind cannot express.
    """
    settings = job.settings
    refuse_gang(job, "An Indexed Job")
    template = pod_template(
        job,
        env={"MASTER_ADDR": f"{job.name}-0.{job.name}", "MASTER_PORT": str(MASTER_PORT)} if job.nodes > 1 else {},
        subdomain=job.name if job.nodes > 1 else None,
    )
    workload: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(job),
        "spec": job_spec(job, template),
    }
    if settings.queue:
        workload["metadata"]["labels"][KUEUE_QUEUE] = settings.queue
    service = (headless_service(job, job.name),) if job.nodes > 1 else ()
    return Manifests(workload, (*support_objects(job), *service), {"node": template})


def refuse_gang(job: ClusterJob, kind: str) -> None:
    gang = job.settings.gang_scheduling
    if gang != "none":
        raise UserInputError(
            f"{kind} cannot ask for gang scheduling ({gang}).",
            fix="Use Kueue (cluster.queue), or --to trainjob or pytorchjob.",
        )


def job_spec(job: ClusterJob, template: Manifest) -> Manifest:
    """The spec of an Indexed Job with one pod per node."""
    settings = job.settings
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": settings.restarts * job.nodes,  # every node of a failed attempt counts
        "podFailurePolicy": pod_failure_policy(template),
        "template": template,
    }
    if settings.max_hours is not None:
        spec["activeDeadlineSeconds"] = seconds(settings.max_hours)
    if settings.keep_hours is not None:
        spec["ttlSecondsAfterFinished"] = seconds(settings.keep_hours)
    return spec


def pod_failure_policy(template: Manifest) -> Manifest:
    """A pod that would fail the same way again ends the Job. One that the cluster ended (evicted, preempted) does not
    count as a failure, and neither do the pods that stopped and saved together with it."""
    container = template["spec"]["containers"][0]["name"]

    def exits_with(*codes: int) -> Manifest:
        return {"containerName": container, "operator": "In", "values": list(codes)}

    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": exits_with(WRONG_INPUT, OUT_OF_MEMORY)},
            {"action": "Ignore", "onExitCodes": exits_with(PREEMPTED)},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }


def seconds(hours: float) -> int:
    """Kubernetes counts deadlines in whole seconds, and refuses a deadline of none."""
    return max(1, round(3600 * hours)) if hours else 0
