"""What would an administrator of OpenShift apply for this job? An SCC that allows what it asks for, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_subject import Pod
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from shardtune.cluster.manifests import Manifest
    from shardtune.cluster.spec import ClusterJob

# Volumes of `restricted-v2`.
_VOLUMES = [
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
]  # fmt: skip
_HOST = {"hostNetwork": "allowHostNetwork", "hostPID": "allowHostPID", "hostIPC": "allowHostIPC"}


def beyond_restricted(pod: Pod) -> dict[str, str]:
    """What the pod asks for that `restricted-v2` refuses: what it is, and the field of the SCC that allows it."""
    return {what: field for what, field, _ in _demands(pod)}


def render_scc(job: ClusterJob, pod: Pod) -> list[Manifest]:
    """SCC, ClusterRole, ServiceAccount and RoleBinding for one pod template; nothing where `restricted-v2` admits it.

    Raises:
        UserInputError: without a namespace or a ServiceAccount, nobody knows whom to allow it.
    """
    demands = list(_demands(pod))
    if not demands:
        return []
    namespace = job.settings.namespace or (f"runai-{job.settings.runai_project}" if job.settings.runai_project else "")
    account = str(pod.spec.get("serviceAccountName") or "")
    if not namespace or account in ("", "default"):
        key, example = ("cluster.namespace", "ml") if not namespace else ("cluster.service_account", "shardtune")
        raise UserInputError(
            f"{key} is not set.",
            why="An SCC is bound to a ServiceAccount of a namespace; with `default`, every pod there would have it.",
            fix=f"Set {key}, such as {example}.",
        )
    name = f"shardtune-{namespace}-{account}"
    scc = _constraints(name)
    for _, field, value in demands:
        scc[field] = sorted({*scc[field], *value}) if isinstance(scc.get(field), list) else value
    if "hostPath" in scc["volumes"]:
        scc["allowHostDirVolumePlugin"] = True
    labels = {"app.kubernetes.io/name": "shardtune", "app.kubernetes.io/managed-by": "shardtune"}
    role = {
        "apiGroups": ["security.openshift.io"],
        "resources": ["securitycontextconstraints"],
        "resourceNames": [name],
        "verbs": ["use"],
    }
    authorization = "rbac.authorization.k8s.io"
    return [
        scc,
        {"apiVersion": f"{authorization}/v1", "kind": "ClusterRole", "metadata": {"name": name, "labels": labels},
         "rules": [role]},
        {"apiVersion": "v1", "kind": "ServiceAccount",
         "metadata": {"name": account, "namespace": namespace, "labels": labels}},
        {"apiVersion": f"{authorization}/v1", "kind": "RoleBinding",
         "metadata": {"name": name, "namespace": namespace, "labels": labels},
         "roleRef": {"apiGroup": authorization, "kind": "ClusterRole", "name": name},
         "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]},
    ]  # fmt: skip


def _constraints(name: str) -> Manifest:
    """`restricted-v2` under another name."""
    return {
        "apiVersion": "security.openshift.io/v1",
        "kind": "SecurityContextConstraints",
        "metadata": {"name": name, "annotations": {"kubernetes.io/description": "restricted-v2, and what jobs need"}},
        "allowHostDirVolumePlugin": False,
        "allowHostIPC": False,
        "allowHostNetwork": False,
        "allowHostPID": False,
        "allowHostPorts": False,
        "allowPrivilegeEscalation": False,
        "allowPrivilegedContainer": False,
        "allowedCapabilities": ["NET_BIND_SERVICE"],
        "defaultAddCapabilities": [],
        "requiredDropCapabilities": ["ALL"],
        "fsGroup": {"type": "MustRunAs"},
        "readOnlyRootFilesystem": False,
        "runAsUser": {"type": "MustRunAsRange"},
        "seLinuxContext": {"type": "MustRunAs"},
        "seccompProfiles": ["runtime/default"],
        "supplementalGroups": {"type": "RunAsAny"},
        "users": [],
        "groups": [],
        "volumes": list(_VOLUMES),
    }  # fmt: skip


def _demands(pod: Pod) -> Iterator[tuple[str, str, Any]]:
    """(what, field of the SCC, its value), of the pod and all its containers."""
    contexts = [pod.spec.get("securityContext") or {}]
    contexts += [container.get("securityContext") or {} for _, container in pod.containers]
    uids = sorted({int(one["runAsUser"]) for one in contexts if one.get("runAsUser") is not None})
    if len(uids) == 1:
        yield f"user id {uids[0]}", "runAsUser", {"type": "MustRunAs", "uid": uids[0]}
    elif uids:
        span = {"type": "MustRunAsRange", "uidRangeMin": uids[0], "uidRangeMax": uids[-1]}
        yield f"user ids {uids[0]} to {uids[-1]}", "runAsUser", span
    for group in (one["fsGroup"] for one in contexts if one.get("fsGroup") is not None):
        yield f"volume group {group}", "fsGroup", {"type": "MustRunAs", "ranges": [{"min": group, "max": group}]}
    added = {str(name) for one in contexts for name in (one.get("capabilities") or {}).get("add") or ()}
    for name in sorted(added - {"NET_BIND_SERVICE"}):
        yield f"capability {name}", "allowedCapabilities", [name]
    if any(one.get("privileged") for one in contexts):
        yield "a privileged container", "allowPrivilegedContainer", True
        yield "a privileged container's capabilities", "requiredDropCapabilities", []
    if any(one.get("privileged") or one.get("allowPrivilegeEscalation") for one in contexts):
        yield "privilege escalation", "allowPrivilegeEscalation", True
    for key, field in _HOST.items():
        if pod.spec.get(key):
            yield key, field, True
    if pod.spec.get("hostNetwork") or any(
        port.get("hostPort") for _, container in pod.containers for port in container.get("ports") or ()
    ):
        yield "ports of the node", "allowHostPorts", True
    for kind in {key for volume in pod.spec.get("volumes") or () for key in volume} - {"name", *_VOLUMES}:
        yield f"{kind} volumes", "volumes", [kind]
