"""What does Run:ai need? A manifest for its scheduler, or the arguments of its command.

Manifests are the first choice: every release since 2.20 schedules any Kubernetes kind in a project's namespace, and 3.0
has no other kinds. The command (`runai training pytorch submit`) is for sites whose users have it and nothing else; it
cannot say everything, and what it cannot say is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import NETWORKS, SECRET_KEY, container_command, labels, needs_secret, support_objects
from shardtune.cluster.quantity import parse_quantity
from shardtune.cluster.render_pytorchjob import restart_limit
from shardtune.cluster.spec import CONFIG_FOLDER, ClusterJob, shared_memory_quantity
from shardtune.cluster.unsupported import refuse_settings
from shardtune.errors import UserInputError
from shardtune.launch.network import SECRET_VARIABLE
from shardtune.run.stop_request import GRACE_VARIABLE

Generation = Literal["cli", "cli-2.20"]

SCHEDULER, KAI_SCHEDULER = "runai-scheduler", "kai-scheduler"
# Run:ai takes the project of a pod from `project`, or from its namespace; `runai/queue` is what its documentation asks
# for. The scheduler without the platform (KAI ≥ 0.6) reads its own key.
PROJECT_LABEL, QUEUE_LABEL, KAI_QUEUE_LABEL = "project", "runai/queue", "kai.scheduler/queue"
PRIORITY_LABEL = "priorityClassName"
NODE_POOLS = "kai.scheduler/node-pools"  # annotation: node pools by preference, separated by spaces
NODE_TYPE = "run.ai/type"  # label of nodes that --node-type selects
PRIORITIES = ("very-low", "low", "medium-low", "medium", "medium-high", "high", "very-high")
_DEFAULT_GRACE = 30  # of Kubernetes; release 2.20 has no flag for another

_BY_ITSELF = {
    "queue": "remove it; the project (cluster.runai_project) is the queue, and a job that Kueue holds back as well "
    "would wait for both",
    "gang_scheduling": "remove it; Run:ai starts all pods or none by itself",
}


# --- a manifest -----------------------------------------------------------------------------------------------------


def for_runai(job: ClusterJob) -> ClusterJob:
    """The job with what Run:ai's scheduler reads: its name, the project's namespace, labels of queue and priority.

    Raises:
        UserInputError: no project, or a setting that Run:ai takes over.
    """
    settings, project = job.settings, required_project(job)
    topology = "use annotations (kai.scheduler/topology and kai.scheduler/topology-required-placement)"
    refuse_settings(job, "A manifest for Run:ai", {**_BY_ITSELF, "topology": topology})
    scheduler = settings.scheduler_name or SCHEDULER
    ours = {PROJECT_LABEL: project, KAI_QUEUE_LABEL if scheduler == KAI_SCHEDULER else QUEUE_LABEL: project}
    if settings.priority_class:
        ours[PRIORITY_LABEL] = settings.priority_class
    changed = settings.model_copy(
        update={
            "namespace": namespace(job),
            "scheduler_name": scheduler,
            "labels": {**ours, **settings.labels},
        }
    )
    return replace(job, settings=changed)


def render_runai(job: ClusterJob, render_kind: Callable[[ClusterJob], Manifests]) -> Manifests:
    """The manifests of a kind (`cluster.runai_kind`) for Run:ai's scheduler.

    Args:
        render_kind: The renderer of that kind.
    """
    return render_kind(for_runai(job))


def required_project(job: ClusterJob) -> str:
    if not job.settings.runai_project:
        raise UserInputError(
            "cluster.runai_project is not set.",
            why="Run:ai schedules a job by the quota of its project.",
            fix="Set it (`runai project list` shows yours).",
        )
    return job.settings.runai_project


def namespace(job: ClusterJob) -> str:
    """Of the project: runai-PROJECT, unless the administrator gave it another."""
    return job.settings.namespace or f"runai-{required_project(job)}"


# --- the command ----------------------------------------------------------------------------------------------------


def runai_argv(job: ClusterJob, generation: Generation) -> list[str]:
    """`runai training pytorch submit NAME …`: one master and nodes - 1 workers, all alike.

    The ConfigMap and the Secret of `runai_support` have to exist before: the command only refers to them.

    Args:
        generation: `cli` for today's command (2.22 to 3.0), `cli-2.20` for that release.

    Raises:
        UserInputError: settings that the command cannot express, with what to do instead.
    """
    project = required_project(job)
    refuse_settings(job, _command_name(generation), _not_in_the_command(job, generation), _MANIFEST_INSTEAD)
    words = ["runai", "training", "pytorch", "submit", job.name, "--project", project, "--image", _image(job)]
    for flag, value in _flags(job, generation):
        words += [flag] if value is None else [flag, value]
    return [*words, "--command", "--", *container_command(job)]


def runai_support(job: ClusterJob) -> tuple[Manifest, ...]:
    """What the command refers to, in the project's namespace: run.yaml, and the nodes' shared secret."""
    return support_objects(replace(job, settings=job.settings.model_copy(update={"namespace": namespace(job)})))


def namespace_warning(job: ClusterJob) -> str | None:
    """What has to be true where the section names a namespace: the command sends the pods to the project's own."""
    usual, where = f"runai-{required_project(job)}", namespace(job)
    if where == usual:
        return None
    return (
        f"cluster.namespace is {where}: it has to be the namespace of the Run:ai project {required_project(job)} "
        f"(usually {usual}). The command `runai` makes the pods in the project's namespace whatever is set here, and "
        "they start only if their ConfigMap and Secret are there too."
    )


_MANIFEST_INSTEAD = "Or send a manifest: cluster.runai_submit: manifest."


def _command_name(generation: Generation) -> str:
    return "The command `runai training pytorch submit`" + (" of release 2.20" if generation == "cli-2.20" else "")


def _image(job: ClusterJob) -> str:
    if not job.settings.image:
        raise UserInputError("cluster.image is not set.", fix="Set the container image of the job.")
    return job.settings.image


def _not_in_the_command(job: ClusterJob, generation: Generation) -> dict[str, str]:
    """Settings without a flag. The values of some settings have one, and those of others do not."""
    settings = job.settings
    found = {
        **_BY_ITSELF,
        "scheduler_name": "remove it; the command always uses Run:ai's scheduler",
        "image_pull_secrets": "remove it; Run:ai takes registry credentials from the project (its UI: Credentials)",
        "ephemeral_storage": "remove it",
        "env_from_secrets": "name each variable in cluster.secret_env",
        "service_account": "remove it",
        "fs_group": "remove it",
        "affinity": "use cluster.node_selector with run.ai/type",
        "topology_spread": "use cluster.topology",
        "max_hours": "remove it, or let the administrator limit the project",
        "init_doctor": "remove it; every node is checked before it starts",
        "pod_overlay": "remove it",
    }
    if any(volume.sub_path or volume.read_only for volume in settings.volumes):
        found["volumes"] = "remove sub_path and read_only"
    if set(settings.node_selector) - {NODE_TYPE}:
        found["node_selector"] = f"select nodes by {NODE_TYPE}"
    if generation == "cli-2.20":
        found |= {
            "priority_class": "remove it",
            "grace_seconds": f"remove it; the grace period is {_DEFAULT_GRACE} s",
            "shared_memory": "remove it (auto): --large-shm has no size",
        }
    elif settings.priority_class not in (None, *PRIORITIES):
        found["priority_class"] = f"choose one of {', '.join(PRIORITIES)}"
    return found


def _flags(job: ClusterJob, generation: Generation) -> Iterator[tuple[str, str | None]]:
    yield from _resource_flags(job, generation)
    yield from _pod_flags(job, generation)
    for volume in job.settings.volumes:
        yield "--existing-pvc", f"claimname={volume.claim},path={volume.path}"
    if job.config is not None:
        yield "--configmap-map-volume", f"name={job.config_name},path={CONFIG_FOLDER}"
    yield from _env_flags(job, generation)


def _resource_flags(job: ClusterJob, generation: Generation) -> Iterator[tuple[str, str | None]]:
    settings = job.settings
    if job.nodes > 1:
        yield "--workers", str(job.nodes - 1)  # the master is not among them
    extended = dict(settings.extended_resources)
    if settings.gpus_per_node and settings.gpu_resource == "nvidia.com/gpu":
        yield "--gpu-devices-request", str(settings.gpus_per_node)
    elif settings.gpus_per_node:
        extended[settings.gpu_resource] = str(settings.gpus_per_node)
    for flag, cores in (("--cpu-core-request", settings.cpu), ("--cpu-core-limit", settings.cpu_limit)):
        if cores:
            yield flag, _cores(cores)
    if settings.memory:
        yield "--cpu-memory-request", settings.memory
    if limit := settings.memory_limit or settings.memory:
        yield "--cpu-memory-limit", limit
    for name, amount in extended.items():
        yield "--extended-resource", f"{name}={amount}"
    if settings.shared_memory == "auto" or generation == "cli-2.20":
        yield "--large-shm", None
    else:
        size = shared_memory_quantity(job)
        yield "--empty-dir-volume", f"name=shm,path=/dev/shm,medium=Memory,size-limit={size}"


def _pod_flags(job: ClusterJob, generation: Generation) -> Iterator[tuple[str, str | None]]:
    settings = job.settings
    annotations = dict(settings.annotations)
    for pool in annotations.pop(NODE_POOLS, "").split():
        yield "--node-pools", pool
    if settings.networks:
        annotations[NETWORKS] = ", ".join(settings.networks)
    for name, value in annotations.items():
        yield "--annotation", f"{name}={value}"
    for name, value in labels(job).items():
        yield "--label", f"{name}={value}"
    if NODE_TYPE in settings.node_selector:
        yield "--node-type", settings.node_selector[NODE_TYPE]
    for toleration in settings.tolerations:
        yield "--toleration", _toleration(toleration)
    for capability in settings.capabilities:
        yield "--capability", capability
    single: dict[str, Any] = {
        "--image-pull-policy": settings.image_pull_policy,
        "--run-as-uid": settings.run_as_uid,
        "--run-as-gid": settings.run_as_gid,
        "--working-dir": settings.working_dir,
        "--required-pod-topology-key": settings.topology,
        "--priority": settings.priority_class,
        "--backoff-limit": restart_limit(job),  # the command makes a PyTorchJob
    }
    if settings.keep_hours is not None:
        single["--auto-deletion-time-after-completion"] = f"{max(1, round(3600 * settings.keep_hours))}s"
    if generation == "cli":
        single["--termination-grace-period"] = f"{job.grace_seconds}s"
    for flag, value in single.items():
        if value is not None:
            yield flag, str(value)


def _env_flags(job: ClusterJob, generation: Generation) -> Iterator[tuple[str, str]]:
    # `--environment` of 2.20 names an environment asset today; `-e` means the same in both.
    plain = dict(job.env)
    if generation == "cli-2.20" and GRACE_VARIABLE not in job.settings.env:
        plain[GRACE_VARIABLE] = str(_DEFAULT_GRACE)  # what the pods will have: the run warns if it is too short
    for name, value in plain.items():
        yield "-e", f"{name}={value}"
    secret = dict(job.settings.secret_env)
    if needs_secret(job):
        secret[SECRET_VARIABLE] = f"{job.secret_name}/{SECRET_KEY}"
    for name, where in secret.items():
        resource, _, key = where.partition("/")
        if generation == "cli-2.20":
            yield "-e", f"{name}=SECRET:{resource},{key}"
        else:
            yield "--env-secret", f"{name}={resource},key={key}"


def _cores(quantity: str) -> str:
    """The flags take a number of cores: `500m` → `0.5`."""
    try:
        return format(parse_quantity(quantity).normalize(), "f")
    except ValueError:
        raise UserInputError(f"'{quantity}' is not a number of CPU cores.", fix="Write 16, 0.5 or 500m.") from None


def _toleration(toleration: Mapping[str, Any]) -> str:
    names = {"operator": "operator", "key": "key", "value": "value", "effect": "effect", "tolerationSeconds": "seconds"}
    if unknown := set(toleration) - set(names):
        raise UserInputError(
            f"cluster.tolerations has {', '.join(sorted(unknown))}, which the command `runai` does not take.",
            fix=f"Tolerations have {', '.join(names)}. {_MANIFEST_INSTEAD}",
        )
    given = {"operator": "Equal", **toleration}
    return ",".join(f"{short}={given[name]}" for name, short in names.items() if given.get(name) is not None)
