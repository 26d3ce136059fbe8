"""A PyTorchJob of Kubeflow's Training Operator: node 0 is its Master, the others are its Workers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import KUEUE_QUEUE, metadata, pod_template, support_objects
from shardtune.cluster.render_job import seconds
from shardtune.cluster.spec import ClusterJob

_CONTAINER = "pytorch"


def render_pytorchjob(job: ClusterJob) -> Manifests:
    """Pods are called `<name>-master-0` and `<name>-worker-<i>`; RANK is the node rank."""
    settings = job.settings
    # The operator sets it, after our own: the API server would warn of the second.
    env = {name: value for name, value in job.env.items() if name != "PYTHONUNBUFFERED" or name not in job.reasons}
    master = pod_template(replace(job, env=env), container=_CONTAINER, restart_policy=None)
    # With `ExitCode` every code below 128 would be final, also those of a run that asks to be restarted (69, 75, 76).
    # With `OnFailure` the container starts again where it is, whatever the code: invalid input is tried again, too.
    restart = "OnFailure" if settings.restarts else "Never"
    replicas: Manifest = {"Master": {"replicas": 1, "restartPolicy": restart, "template": master}}
    templates = {"master": master}
    if job.nodes > 1:  # without: the operator refuses zero workers
        templates["worker"] = deepcopy(master)
        replicas["Worker"] = {"replicas": job.nodes - 1, "restartPolicy": restart, "template": templates["worker"]}
    workload: Manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job),
        # A number, and as text: with the default (`auto`) WORLD_SIZE would count nodes.
        "spec": {
            "nprocPerNode": str(job.nproc),
            "runPolicy": _run_policy(job),
            "pytorchReplicaSpecs": replicas,
        },
    }
    if settings.queue:
        workload["metadata"]["labels"][KUEUE_QUEUE] = settings.queue
    return Manifests(workload, support_objects(job), templates)


def restart_limit(job: ClusterJob) -> int:
    """`backoffLimit` for `cluster.restarts`.

    The job fails once the containers of all pods together have restarted this often, and all restart together.
    """
    return job.settings.restarts * job.nodes + 1 if job.settings.restarts else 0


def _run_policy(job: ClusterJob) -> Manifest:
    settings = job.settings
    # Pods that have ended stay, for their logs; those that still run when the job has ended give their GPUs back.
    policy: Manifest = {"cleanPodPolicy": "Running"}
    if settings.restarts:
        policy["backoffLimit"] = restart_limit(job)
    if settings.max_hours is not None:
        policy["activeDeadlineSeconds"] = seconds(settings.max_hours)
    if settings.keep_hours is not None:
        policy["ttlSecondsAfterFinished"] = seconds(settings.keep_hours)
    if settings.gang_scheduling != "none":
        # Which scheduler does it is the operator's setting; it also gives the pods that scheduler's name.
        policy["schedulingPolicy"] = {"minAvailable": job.nodes}
        if settings.priority_class:  # of the group; that of the pods is theirs
            policy["schedulingPolicy"]["priorityClass"] = settings.priority_class
    return policy
