"""A JobSet: one Indexed Job of all nodes, restarted as a whole. A TrainJob's runtime holds the same spec."""

from __future__ import annotations

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import KUEUE_QUEUE, labels, metadata, pod_template, support_objects
from shardtune.cluster.render_job import pod_failure_policy, refuse_gang, seconds
from shardtune.cluster.spec import MASTER_PORT, ClusterJob
from shardtune.errors import UserInputError

NODE_JOB = "node"  # of the replicated job; a TrainJob's master address has this name in it, whatever the job is called


def render_jobset(job: ClusterJob) -> Manifests:
    """Pods are called `<name>-node-0-<index>.<name>`; JOB_COMPLETION_INDEX is the node rank.

    Raises:
        UserInputError: a setting that this kind cannot express.
    """
    settings = job.settings
    refuse_gang(job, "A JobSet")
    # No `spec.coordinator`: its value is a label of at most 63 characters that holds the job's name twice.
    template = pod_template(
        job, env={"MASTER_ADDR": master_address(job), "MASTER_PORT": str(MASTER_PORT)} if job.nodes > 1 else {}
    )
    spec = jobset_spec(job, template, deadline_in_job=True)
    if settings.keep_hours is not None:
        spec["ttlSecondsAfterFinished"] = seconds(settings.keep_hours)
    workload: Manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job),
        "spec": spec,
    }
    if settings.queue:
        workload["metadata"]["labels"][KUEUE_QUEUE] = settings.queue
    return Manifests(workload, support_objects(job), {"node": template})


def master_address(job: ClusterJob) -> str:
    """JobSet's headless Service, which has the JobSet's name, gives every pod a name."""
    return f"{job.name}-{NODE_JOB}-0-0.{job.name}"


def jobset_spec(job: ClusterJob, template: Manifest, *, deadline_in_job: bool) -> Manifest:
    """One Job with a pod per node. A pod that fails fails the Job, and the JobSet makes all pods anew.

    What JobSet's webhook would fill in is written out: the names of pods and the node rank depend on it.

    Args:
        deadline_in_job: Nothing above the Job can hold `cluster.max_hours`.

    Raises:
        UserInputError: the deadline of a Job would begin anew with every restart.
    """
    settings = job.settings
    job_spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": pod_failure_policy(template),
        "template": template,
    }
    reasons = ["PodFailurePolicy"]
    if settings.max_hours is not None and deadline_in_job:
        if settings.restarts:
            raise UserInputError(
                f"cluster.max_hours ({settings.max_hours:g}) cannot be kept together with cluster.restarts "
                f"({settings.restarts}) by this kind.",
                why="A JobSet has no deadline. The one of the Job in it would begin anew with every restart.",
                fix="Set cluster.restarts: 0, or use --to trainjob (Trainer 2.2 or later), pytorchjob or job.",
            )
        job_spec["activeDeadlineSeconds"] = seconds(settings.max_hours)
        reasons.append("DeadlineExceeded")
    permanent = {"name": "permanentFailure", "action": "FailJobSet", "onJobFailureReasons": reasons}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": settings.restarts, "rules": [permanent]},
        "replicatedJobs": [
            {"name": NODE_JOB, "replicas": 1, "template": {"metadata": {"labels": labels(job)}, "spec": job_spec}}
        ],
    }
