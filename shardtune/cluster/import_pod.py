"""What does a pod template ask for? Each field becomes a setting of `cluster`; the rest is kept in `pod_overlay`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardtune.cluster.import_command import ReadScript, import_command
from shardtune.cluster.import_report import Imported
from shardtune.cluster.import_values import (
    LIMIT_ABOVE_REQUEST,
    import_capability,
    import_extended_resource,
    import_memory,
    import_network,
    import_uid,
    import_variable,
    read_path,
)
from shardtune.cluster.pod import CONTAINER, KUEUE_TOPOLOGY, NETWORKS
from shardtune.cluster.render_runai import KAI_SCHEDULER, SCHEDULER
from shardtune.cluster.spec import CONFIG_FOLDER

_MAIN = ("pytorch", "node", "trainer")  # what the kinds call the container that trains
_SETTINGS_OF_POD = {
    "serviceAccountName": "service_account",
    "nodeSelector": "node_selector",
    "tolerations": "tolerations",
    "affinity": "affinity",
    "topologySpreadConstraints": "topology_spread",
    "priorityClassName": "priority_class",
}
_SET_BY_KIND = ("restartPolicy", "hostname", "subdomain", "serviceAccount", "enableServiceLinks", "dnsPolicy")
_LEAST_GRACE = 120
_LIMIT_IS_REQUEST = "There is no request, and Kubernetes then requests as much as the limit."


@dataclass(frozen=True)
class _Reader:
    found: Imported
    where: str
    read_script: ReadScript
    keep_uid: bool

    def key(self, *path: str) -> str:
        return ".".join((self.where, *path))


def import_template(
    found: Imported, where: str, template: Mapping[str, Any], read_script: ReadScript, keep_uid: bool
) -> None:
    """Read a pod template.

    Args:
        where: Path of the template in the file, for the verdicts.
    """
    reader = _Reader(found, where, read_script, keep_uid)
    metadata = template.get("metadata") or {}
    import_labels(found, reader.key("metadata.labels"), metadata.get("labels") or {})
    _import_annotations(reader, metadata.get("annotations") or {})
    spec = dict(template.get("spec") or {})
    containers = list(spec.pop("containers", None) or [])
    main = next((one for one in containers if one.get("name") in _MAIN), containers[0] if containers else {})
    volumes = {str(one.get("name")): one for one in spec.pop("volumes", None) or []}
    _import_container(reader, main, volumes)
    for other in containers:
        if other is not main:
            found.overlay(reader.key("containers", str(other.get("name"))), "", {"containers": [dict(other)]})
    for volume in volumes.values():
        found.overlay(reader.key("volumes", str(volume.get("name"))), "", {"volumes": [volume]})
    _import_pod_spec(reader, spec)


def import_labels(found: Imported, where: str, labels: Mapping[str, Any]) -> None:
    for name, value in labels.items():
        if name.startswith(("app.kubernetes.io/", "shardtune.dev/", "training.kubeflow.org/", "jobset.sigs.k8s.io/")):
            found.add(f"{where}.{name}", value, "no effect", "The rendered job and its controller set it.")
        elif name == "kueue.x-k8s.io/queue-name":
            found.set(f"{where}.{name}", value, "queue", str(value), verdict="translated")
        elif name in ("project", "runai/queue", "kai.scheduler/queue"):
            found.set(f"{where}.{name}", value, "runai_project", str(value), verdict="translated")
        elif name == "priorityClassName":
            found.set(f"{where}.{name}", value, "priority_class", str(value), verdict="translated")
        elif found.section.get("labels", {}).get(name) != str(value):  # the job and its pods usually have the same
            found.put(f"{where}.{name}", value, "labels", name, str(value))


def _import_annotations(reader: _Reader, annotations: Mapping[str, Any]) -> None:
    for name, value in annotations.items():
        key = reader.key("metadata.annotations", name)
        if name == NETWORKS:
            import_network(reader.found, key, str(value))
        elif name == KUEUE_TOPOLOGY:
            reader.found.set(key, value, "topology", str(value), verdict="translated")
        else:
            reader.found.put(key, value, "annotations", name, str(value))


# --- the container --------------------------------------------------------------------------------------------------


def _import_container(reader: _Reader, container: Mapping[str, Any], volumes: dict[str, dict[str, Any]]) -> None:
    found, rest = reader.found, dict(container)
    rest.pop("name", None)
    if image := rest.pop("image", None):
        import_image(found, reader.key("image"), str(image))
    if policy := rest.pop("imagePullPolicy", None):
        found.set(reader.key("imagePullPolicy"), policy, "image_pull_policy", policy)
    if folder := rest.pop("workingDir", None):
        path, why, verdict = read_path(str(folder))
        found.set(reader.key("workingDir"), folder, "working_dir", path, why, verdict)
    words = [str(word) for word in [*(rest.pop("command", None) or []), *(rest.pop("args", None) or [])]]
    if words:
        import_command(found, reader.key("command"), words, reader.read_script)
    import_env(found, reader.key("env"), rest.pop("env", None) or [])
    _import_env_from(reader, rest.pop("envFrom", None) or [])
    import_resources(found, reader.key("resources"), rest.pop("resources", None) or {})
    _import_mounts(reader, rest.pop("volumeMounts", None) or [], volumes)
    _import_container_security(reader, rest.pop("securityContext", None) or {})
    for name in ("ports", "tty", "stdin", "terminationMessagePath", "terminationMessagePolicy"):
        if name in rest:
            found.add(
                reader.key(name), rest.pop(name), "no effect", "Training needs none; the controller adds its own."
            )
    for name, value in rest.items():
        found.overlay(reader.key(name), value, {"containers": [{"name": CONTAINER, name: value}]})


def import_image(found: Imported, key: str, image: str) -> None:
    found.check["image"] = "it has to contain shardtune (docs/cluster.md)."
    why = "" if "@sha256:" in image else "A tag can change between two starts of one run; a digest (@sha256:…) cannot."
    found.set(key, image, "image", image, why)


def import_env(found: Imported, key: str, variables: list[Mapping[str, Any]]) -> None:
    for variable in variables:
        name = str(variable.get("name", ""))
        source = variable.get("valueFrom")
        if not source:
            import_variable(found, key, name, str(variable.get("value") or ""))
        elif secret := source.get("secretKeyRef"):
            found.put(f"{key}.{name}", "", "secret_env", name, f"{secret.get('name')}/{secret.get('key')}")
        else:
            kept = {"containers": [{"name": CONTAINER, "env": [dict(variable)]}]}
            found.overlay(f"{key}.{name}", ", ".join(source), kept)


def _import_env_from(reader: _Reader, sources: list[Mapping[str, Any]]) -> None:
    for source in sources:
        key = reader.key("envFrom")
        if (secret := source.get("secretRef")) and not source.get("prefix"):
            reader.found.append(key, secret.get("name"), "env_from_secrets", str(secret.get("name")))
        else:
            reader.found.add(key, dict(source), "not supported", "Write its variables into env, one by one.")


def import_resources(found: Imported, key: str, resources: Mapping[str, Any]) -> None:
    """Requests and limits: GPUs and other extended resources have equal ones."""
    requests = {name: str(value) for name, value in (resources.get("requests") or {}).items()}
    limits = {name: str(value) for name, value in (resources.get("limits") or {}).items()}
    for name in dict.fromkeys([*requests, *limits]):
        amount = limits.get(name) or requests[name]
        if name in ("memory", "cpu"):
            continue
        if name == "ephemeral-storage":
            request = requests.get(name, amount)
            why = "" if request == amount else f"Request and limit are one setting: the request was {request}."
            found.set(f"{key}.{name}", amount, "ephemeral_storage", amount, why, "changed" if why else "honoured")
        elif name.endswith("/gpu"):
            _import_gpus(found, f"{key}.{name}", name, amount)
        else:
            import_extended_resource(found, key, name, amount)
    if "cpu" in requests:
        found.set(f"{key}.requests.cpu", requests["cpu"], "cpu", requests["cpu"])
    elif "cpu" in limits:
        found.set(f"{key}.limits.cpu", limits["cpu"], "cpu", limits["cpu"], _LIMIT_IS_REQUEST, "translated")
    if "cpu" in limits:
        why = "A limit throttles the processes that feed the GPUs; it can be left out."
        found.set(f"{key}.limits.cpu", limits["cpu"], "cpu_limit", limits["cpu"], why)
    if memory := requests.get("memory") or limits.get("memory"):
        given = "requests" if "memory" in requests else "limits"
        import_memory(
            found, f"{key}.{given}.memory", memory, "memory", "" if given == "requests" else _LIMIT_IS_REQUEST
        )
    if "memory" in limits and limits["memory"] != memory:
        import_memory(found, f"{key}.limits.memory", limits["memory"], "memory_limit")
        found.warn("memory_limit", LIMIT_ABOVE_REQUEST)


def _import_gpus(found: Imported, key: str, name: str, amount: str) -> None:
    if not amount.isdigit():
        found.add(key, amount, "not supported", "Sharded training needs whole GPUs: set gpus_per_node.")
        return
    found.set(key, amount, "gpus_per_node", int(amount))
    if name != "nvidia.com/gpu":
        found.section["gpu_resource"] = name


def _import_mounts(reader: _Reader, mounts: list[Mapping[str, Any]], volumes: dict[str, dict[str, Any]]) -> None:
    """Claims become `volumes`; a tmpfs at /dev/shm its size; other volumes stay in the overlay with their mounts."""
    found, used = reader.found, set()
    for mount in mounts:
        name, path = str(mount.get("name")), str(mount.get("mountPath"))
        volume, key = volumes.get(name), reader.key("volumeMounts", name)
        if volume is None:
            found.add(key, path, "changed", "Left out: the pod has no volume of this name.")
        elif claim := volume.get("persistentVolumeClaim"):
            absolute, why, verdict = read_path(path)
            entry: dict[str, Any] = {"claim": claim.get("claimName"), "path": absolute}
            if mount.get("subPath"):
                entry["sub_path"] = mount["subPath"]
            if mount.get("readOnly") or claim.get("readOnly"):
                entry["read_only"] = True
            found.append(key, path, "volumes", entry, why, verdict)
            used.add(name)
        elif path == "/dev/shm" and "emptyDir" in volume:
            size = (volume["emptyDir"] or {}).get("sizeLimit")
            found.set(key, path, "shared_memory", str(size) if size else "auto", verdict="translated")
            used.add(name)
        elif path == CONFIG_FOLDER:
            found.add(key, path, "no effect", "shardtune submit mounts run.yaml itself.")
            used.add(name)
        else:
            found.overlay(key, path, {"containers": [{"name": CONTAINER, "volumeMounts": [dict(mount)]}]})
    for name in used:
        volumes.pop(name, None)


def _import_container_security(reader: _Reader, context: Mapping[str, Any]) -> None:
    rest = dict(context)
    for name in (rest.pop("capabilities", None) or {}).get("add") or []:
        import_capability(reader.found, reader.key("securityContext.capabilities.add"), str(name))
    if rest.get("allowPrivilegeEscalation") is False:
        rest.pop("allowPrivilegeEscalation")
    _import_ids(reader, rest)
    if rest:
        kept = {"containers": [{"name": CONTAINER, "securityContext": rest}]}
        reader.found.overlay(reader.key("securityContext"), ", ".join(rest), kept)


# --- the pod --------------------------------------------------------------------------------------------------------


def _import_ids(reader: _Reader, context: dict[str, Any]) -> None:
    for field, setting in (("runAsUser", "run_as_uid"), ("runAsGroup", "run_as_gid"), ("fsGroup", "fs_group")):
        if (value := context.pop(field, None)) is not None:
            import_uid(reader.found, reader.key("securityContext", field), str(value), setting, reader.keep_uid)


def _import_pod_spec(reader: _Reader, spec: dict[str, Any]) -> None:
    found = reader.found
    for name, setting in _SETTINGS_OF_POD.items():
        if value := spec.pop(name, None):
            found.set(reader.key(name), value, setting, value)
    for secret in spec.pop("imagePullSecrets", None) or []:
        found.append(reader.key("imagePullSecrets"), secret.get("name"), "image_pull_secrets", str(secret.get("name")))
    if (grace := spec.pop("terminationGracePeriodSeconds", None)) is not None:
        _import_grace(reader, int(grace))
    if scheduler := spec.pop("schedulerName", None):
        _import_scheduler(reader, str(scheduler))
    context = dict(spec.pop("securityContext", None) or {})
    _import_ids(reader, context)
    if context:
        found.overlay(reader.key("securityContext"), ", ".join(context), {"securityContext": context})
    for name in _SET_BY_KIND:
        if name in spec:
            found.add(reader.key(name), spec.pop(name), "no effect", "The rendered job sets it for every pod.")
    for name, value in spec.items():
        found.overlay(reader.key(name), value, {name: value})


def _import_grace(reader: _Reader, seconds: int) -> None:
    key = reader.key("terminationGracePeriodSeconds")
    if seconds < _LEAST_GRACE:
        why = "Left out: too short for a step and a save; the plan computes what is needed."
        reader.found.add(key, seconds, "changed", why, "grace_seconds: auto")
    else:
        reader.found.set(key, seconds, "grace_seconds", seconds)


def _import_scheduler(reader: _Reader, name: str) -> None:
    key, found = reader.key("schedulerName"), reader.found
    if name == "default-scheduler":
        found.add(key, name, "no effect", "The default.")
    elif name in (SCHEDULER, KAI_SCHEDULER):
        found.section["target"] = "runai"
        if name == KAI_SCHEDULER:
            found.section["scheduler_name"] = name
        found.add(key, name, "translated", sets="target: runai")
    elif name == "volcano":
        found.set(key, name, "gang_scheduling", "volcano", verdict="translated")
    else:
        found.set(key, name, "scheduler_name", name)
