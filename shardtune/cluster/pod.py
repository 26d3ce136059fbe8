"""What does a pod of the job look like? The template that every Kubernetes kind shares, and the objects beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from shardtune import __version__
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.spec import CONFIG_FILE, CONFIG_FOLDER, ClusterJob, shared_memory_quantity
from shardtune.errors import UserInputError
from shardtune.launch.network import SECRET_VARIABLE

CONTAINER = "trainer"  # what pod_overlay knows the container by, whatever the kind calls it
DOCTOR = "doctor"  # the init container of cluster.init_doctor
SECRET_KEY = "secret"
JOB_LABEL, RUN_LABEL = "app.kubernetes.io/instance", "shardtune.dev/run"
RUN_FOLDER = "shardtune.dev/run-folder"  # annotation of the workload: where `shardtune pull` finds the run
KUEUE_QUEUE, KUEUE_TOPOLOGY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/podset-required-topology"
NETWORKS = "k8s.v1.cni.cncf.io/networks"
# Lists of Kubernetes whose items are known by one of their keys; any other list of an overlay replaces what is there.
_MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath",
    "imagePullSecrets": "name", "ports": "containerPort", "hostAliases": "ip",
}  # fmt: skip
_MAPPINGS = (
    "metadata", "spec", "labels", "annotations", "securityContext", "capabilities", "resources", "requests", "limits",
    "nodeSelector", "affinity", "emptyDir",
)  # fmt: skip


def labels(job: ClusterJob) -> dict[str, str]:
    """Of every object of the job."""
    return {
        **job.settings.labels,
        "app.kubernetes.io/name": "shardtune",
        "app.kubernetes.io/managed-by": "shardtune",
        "app.kubernetes.io/version": __version__,
        JOB_LABEL: job.name,
        RUN_LABEL: job.name,
    }


def metadata(job: ClusterJob, name: str | None = None) -> Manifest:
    """Of the workload, or with `name` of an object beside it."""
    found: Manifest = {"name": name or job.name, "labels": labels(job)}
    if job.settings.namespace:
        found["namespace"] = job.settings.namespace
    if name is None and job.output_dir is not None:
        found["annotations"] = {RUN_FOLDER: str(job.output_dir / job.name)}
    return found


def pod_template(
    job: ClusterJob,
    *,
    container: str = CONTAINER,
    env: Mapping[str, str] | None = None,
    restart_policy: str | None = "Never",
    subdomain: str | None = None,
) -> Manifest:
    """The pod template.

    Args:
        container: What the kind wants the container to be called (`pytorch`, `node`).
        env: Plain variables that belong to the kind, such as the master's address.
        restart_policy: None where the kind sets it.
        subdomain: The headless Service that gives pods their names, where no controller sets it.
    """
    settings = job.settings
    annotations = dict(settings.annotations)
    if settings.networks:
        annotations[NETWORKS] = ", ".join(settings.networks)
    if settings.topology:
        annotations[KUEUE_TOPOLOGY] = settings.topology
    spec: Manifest = {
        "containers": [_container(job, env or {})],
        "volumes": _volumes(job),
        "terminationGracePeriodSeconds": job.grace_seconds,
        "restartPolicy": restart_policy,
        "subdomain": subdomain,
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "securityContext": _without_empty(
            {"runAsUser": settings.run_as_uid, "runAsGroup": settings.run_as_gid, "fsGroup": settings.fs_group}
        ),
        "nodeSelector": dict(settings.node_selector),
        "tolerations": list(settings.tolerations),
        "affinity": dict(settings.affinity),
        "topologySpreadConstraints": list(settings.topology_spread),
        "priorityClassName": settings.priority_class,
        "schedulerName": settings.scheduler_name,
    }
    if settings.init_doctor:
        spec["initContainers"] = [_doctor(job, spec["containers"][0])]
    check_overlay(settings.pod_overlay)
    base = {
        "metadata": _without_empty({"labels": labels(job), "annotations": annotations}),
        "spec": _without_empty(spec),
    }
    template: Manifest = merge_overlay(base, settings.pod_overlay)
    for one in template["spec"]["containers"]:
        one["name"] = container if one["name"] == CONTAINER else one["name"]
    return template


def support_objects(job: ClusterJob) -> tuple[Manifest, ...]:
    """The ConfigMap with run.yaml, and for several nodes the Secret by which they know each other."""
    found: list[Manifest] = []
    if job.config is not None:
        found.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, job.config_name),
             "data": {CONFIG_FILE: job.config}}
        )  # fmt: skip
    if needs_secret(job):
        found.append(
            {"apiVersion": "v1", "kind": "Secret", "metadata": metadata(job, job.secret_name), "type": "Opaque",
             "stringData": {SECRET_KEY: ""}}
        )  # fmt: skip
    return tuple(found)


def needs_secret(job: ClusterJob) -> bool:
    """Nodes of a run authenticate each other, unless the user brings a secret."""
    return job.nodes > 1 and SECRET_VARIABLE not in {*job.settings.env, *job.settings.secret_env}


def headless_service(job: ClusterJob, name: str) -> Manifest:
    """Gives the pods names before they are ready: the nodes wait for each other to become ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, name),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: job.name}},
    }


_NEEDED = ("metadata", "metadata.labels", "spec", "spec.containers")


def check_overlay(overlay: Any, key: str = "", path: str = "cluster.pod_overlay") -> None:
    """Raise where an overlay has another shape than a pod template, and merging it would leave none."""
    by = _MERGE_KEYS.get(key)
    what = ""
    if overlay is None and path.removeprefix("cluster.pod_overlay.") in _NEEDED:
        what = f"{path} is null, which would remove what a job cannot do without."
    elif by and overlay is not None:
        if not isinstance(overlay, list) or not all(isinstance(item, Mapping) and by in item for item in overlay):
            what = f"{path} is not a list of mappings that each have `{by}`."
        else:
            for index, item in enumerate(overlay):
                check_overlay(item, "", f"{path}[{index}]")
    elif key in ("", *_MAPPINGS) and overlay is not None:
        if not isinstance(overlay, Mapping):
            what = f"{path} is not a mapping."
        elif path == "cluster.pod_overlay" and (unknown := set(overlay) - {"metadata", "spec"}):
            what = f"{path}.{min(unknown)} is no part of a pod template (metadata, spec)."
        else:
            for name, value in overlay.items():
                if name in _MERGE_KEYS or name in _MAPPINGS:
                    check_overlay(value, name, f"{path}.{name}")
    if what:
        raise UserInputError(what, fix="Write it as in a pod template of Kubernetes (docs/cluster.md has examples).")


def merge_overlay(base: Any, overlay: Any, key: str = "") -> Any:
    """`overlay` over `base`: mappings key by key, lists of named things by name, null removes, all else replaces."""
    if isinstance(base, dict) and isinstance(overlay, Mapping):
        merged = dict(base)
        for name, value in overlay.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge_overlay(merged[name], value, name) if name in merged else value
        return merged
    by = _MERGE_KEYS.get(key)
    if by and isinstance(base, list) and isinstance(overlay, Sequence) and all(by in item for item in overlay):
        items = {item.get(by): item for item in base}
        for item in overlay:
            items[item[by]] = merge_overlay(items[item[by]], item) if item[by] in items else item
        return list(items.values())
    return overlay


def _container(job: ClusterJob, env: Mapping[str, str]) -> Manifest:
    settings = job.settings
    context: Manifest = {"allowPrivilegeEscalation": False} if "IPC_LOCK" not in settings.capabilities else {}
    if settings.capabilities:
        context["capabilities"] = {"add": list(settings.capabilities)}
    return _without_empty(
        {
            "name": CONTAINER,
            "image": settings.image,
            "imagePullPolicy": settings.image_pull_policy,
            "command": container_command(job),
            "workingDir": settings.working_dir,
            "env": _env(job, env),
            "envFrom": [{"secretRef": {"name": name}} for name in settings.env_from_secrets],
            "resources": resources(job),
            "volumeMounts": _mounts(job),
            "securityContext": context,
        }
    )


def container_command(job: ClusterJob) -> list[str]:
    """As the API takes it: a kubelet replaces $(NAME) in every word, and reads $$ as $. A script's arguments are meant
    as they stand; `cluster.command` is written as for Kubernetes."""
    return [word.replace("$", "$$") for word in job.command] if job.script is not None else list(job.command)


def resources(job: ClusterJob) -> Manifest:
    """Requests and limits. What has no limit of its own has the request's; extended resources must have equal ones."""
    settings = job.settings
    exact = dict(settings.extended_resources)
    if settings.gpus_per_node:
        exact[settings.gpu_resource] = str(settings.gpus_per_node)
    storage = settings.ephemeral_storage
    requests = {"cpu": settings.cpu, "memory": settings.memory, "ephemeral-storage": storage, **exact}
    memory_limit = settings.memory_limit or settings.memory
    limits = {"cpu": settings.cpu_limit, "memory": memory_limit, "ephemeral-storage": storage, **exact}
    return _without_empty({"requests": _without_empty(requests), "limits": _without_empty(limits)})


def _env(job: ClusterJob, env: Mapping[str, str]) -> list[Manifest]:
    plain = {**env, **job.env}
    found: list[Manifest] = [{"name": name, "value": value} for name, value in plain.items()]
    for name, where in job.settings.secret_env.items():
        secret, _, key = where.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    if needs_secret(job):
        reference = {"secretKeyRef": {"name": job.secret_name, "key": SECRET_KEY}}
        found.append({"name": SECRET_VARIABLE, "valueFrom": reference})
    return found


def _volumes(job: ClusterJob) -> list[Manifest]:
    shared: Manifest = {"medium": "Memory", "sizeLimit": shared_memory_quantity(job)}
    found: list[Manifest] = [{"name": "shm", "emptyDir": shared}]
    if job.config is not None:
        found.append({"name": "config", "configMap": {"name": job.config_name}})
    for claim in dict.fromkeys(volume.claim for volume in job.settings.volumes):
        found.append({"name": volume_name(claim), "persistentVolumeClaim": {"claimName": claim}})
    return found


def volume_name(claim: str) -> str:
    """Of the volume of a claim: claims may have dots, volumes may not."""
    return f"pvc-{claim.replace('.', '-')}"[:63].rstrip("-")


def _mounts(job: ClusterJob) -> list[Manifest]:
    found: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.config is not None:
        found.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    for volume in job.settings.volumes:
        mount: Manifest = {"name": volume_name(volume.claim), "mountPath": volume.path, "subPath": volume.sub_path}
        found.append(_without_empty({**mount, "readOnly": True} if volume.read_only else mount))
    return found


def _doctor(job: ClusterJob, trainer: Manifest) -> Manifest:
    """The same container with another command: it sees what the training will see.

    Each node checks itself alone: the init containers of the others may have ended before, or start much later, and
    few controllers give them the variables of a node.
    """
    words = ["shardtune", "doctor", "--this-node", *doctor_arguments(job, f"{CONFIG_FOLDER}/{CONFIG_FILE}")]
    return {**deepcopy(trainer), "name": DOCTOR, "command": words}


def doctor_arguments(job: ClusterJob, config: str) -> list[str]:
    """For which run the node shall be fit; of a script nothing is known but its processes."""
    if job.script is not None:
        return ["--nproc", str(job.nproc)]
    return [config] if job.config is not None else []


def _without_empty(values: Mapping[str, Any]) -> Manifest:
    return {name: value for name, value in values.items() if value not in (None, "", [], {})}
