"""Would the cluster's security profile refuse the pod? OpenShift's `restricted-v2`, Kubernetes' Pod Security levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_finding import Finding, Rule, error, notice, warning

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Pod, Subject

RULES = (
    Rule(
        "fixed-uid",
        "warning",
        "A fixed user id.",
        "OpenShift's `restricted-v2` allows the namespace's own range only; Pod Security `restricted` refuses 0.",
    ),
    Rule(
        "fs-group",
        "warning",
        "A fixed group for volumes.",
        "OpenShift's `restricted-v2` allows the namespace's own range only.",
    ),
    Rule(
        "capability",
        "error",
        "Capabilities to add (a warning), or one written with `CAP_`.",
        "`restricted-v2` and Pod Security `restricted` allow NET_BIND_SERVICE alone, `baseline` not IPC_LOCK. "
        "Runtimes put `CAP_` before the name themselves, and know no CAP_CAP_…",
    ),
    Rule(
        "ipc-lock",
        "warning",
        "IPC_LOCK for a user other than root.",
        "A process that is not root gets an added capability only as an ambient one, which Kubernetes does not "
        "set: CapEff stays empty, and the memlock limit of the container runtime decides.",
    ),
    Rule(
        "privileged",
        "warning",
        "A privileged container, or one that may gain privileges.",
        "All but the `privileged` profiles refuse it.",
    ),
    Rule(
        "host-access",
        "warning",
        "hostNetwork, hostPID, hostIPC, hostPath, hostPort.",
        "`restricted-v2` and Pod Security `baseline` and `restricted` refuse it.",
    ),
    Rule(
        "pod-security",
        "notice",
        "What Pod Security `restricted` wants and the pod does not say: runAsNonRoot, a seccomp profile, all "
        "capabilities dropped.",
        "A namespace that enforces it refuses the pod. OpenShift fills it in.",
    ),
)

_SCC = "`shardtune cluster scc CONFIG` prints the SCC that an administrator would apply"
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_RESTRICTED = (
    "Where that level is enforced, add to cluster.pod_overlay: spec: {securityContext: {runAsNonRoot: true, "
    "seccompProfile: {type: RuntimeDefault}}, containers: [{name: trainer, securityContext: {capabilities: {drop: "
    "[ALL]}}}]} (the image must then run as a user other than root)."
)


def check_security(subject: Subject) -> Iterator[Finding]:
    if not subject.is_kubernetes:
        return
    for pod in subject.pods:
        yield from _check_ids(subject, pod)
        yield from _check_host(pod)
        for path, container in pod.containers:
            yield from _check_container(subject, pod, path, container)
        yield from _check_restricted(pod)


def effective_uid(pod: Pod, container: dict[str, Any]) -> int | None:
    """The user id that a container asks for; None leaves it to the image or the cluster."""
    for context in (container.get("securityContext"), pod.spec.get("securityContext")):
        if (context or {}).get("runAsUser") is not None:
            return int((context or {})["runAsUser"])
    return None


def _check_ids(subject: Subject, pod: Pod) -> Iterator[Finding]:
    settings = subject.settings
    contexts = [(f"{pod.path}.spec.securityContext", pod.spec.get("securityContext") or {})]
    contexts += [(f"{path}.securityContext", one.get("securityContext") or {}) for path, one in pod.containers]
    for where, context in contexts:
        uid, group = context.get("runAsUser"), context.get("fsGroup")
        if uid is not None:
            path = "cluster.run_as_uid" if uid == settings.run_as_uid else f"{where}.runAsUser"
            refused = "; Pod Security `restricted` refuses root as well" if uid == 0 else ""
            what = f"OpenShift's `restricted-v2` refuses the user id {uid} (not in the namespace's range){refused}"
            fix = f"Leave it out: OpenShift gives the pod an id, and the image's folders belong to group 0. Or: {_SCC}."
            yield warning("fixed-uid", path, what, fix)
        if group is not None:
            path = "cluster.fs_group" if group == settings.fs_group else f"{where}.fsGroup"
            what = f"OpenShift's `restricted-v2` refuses the volume group {group} (not in the namespace's range)"
            yield warning("fs-group", path, what, f"Leave it out: OpenShift sets one. Or: {_SCC}.")


def _check_host(pod: Pod) -> Iterator[Finding]:
    fix = f"Ask for a device plugin's resource or a network (cluster.networks) instead. Or: {_SCC}."
    for key in _HOST:
        if pod.spec.get(key):
            what = f"{key}: refused by `restricted-v2`, and by Pod Security `baseline` and `restricted`"
            yield warning("host-access", f"{pod.path}.spec.{key}", what, fix)
    for index, volume in enumerate(pod.spec.get("volumes") or ()):
        if "hostPath" in volume:
            what = f"the hostPath volume '{volume.get('name')}': refused by `restricted-v2` and Pod Security `baseline`"
            fix_volume = f"Use a PersistentVolumeClaim (cluster.volumes). Or: {_SCC}."
            yield warning("host-access", f"{pod.path}.spec.volumes[{index}]", what, fix_volume)
    for path, container in pod.containers:
        for index, port in enumerate(container.get("ports") or ()):
            if port.get("hostPort"):
                what = f"hostPort {port['hostPort']}: refused by `restricted-v2` and Pod Security `baseline`"
                yield warning(
                    "host-access", f"{path}.ports[{index}]", what, "Remove it; nodes reach each other by pod names."
                )


def _check_container(subject: Subject, pod: Pod, path: str, container: dict[str, Any]) -> Iterator[Finding]:
    context = container.get("securityContext") or {}
    where = f"{path}.securityContext"
    if context.get("privileged"):
        what = "a privileged container: only the `privileged` profiles admit it"
        yield warning(
            "privileged", f"{where}.privileged", what, f"Ask for the capability or device it needs. Or: {_SCC}."
        )
    elif context.get("allowPrivilegeEscalation"):
        what = "allowPrivilegeEscalation: refused by `restricted-v2` and Pod Security `restricted`"
        yield warning("privileged", f"{where}.allowPrivilegeEscalation", what, "Remove it.")
    added = list(dict.fromkeys((context.get("capabilities") or {}).get("add") or ()))
    for name in map(str, added):
        at = "cluster.capabilities" if name in subject.settings.capabilities else f"{where}.capabilities.add"
        yield from _check_capability(at, name)
    uid = effective_uid(pod, container)
    if "IPC_LOCK" in added and uid != 0:
        at = "cluster.capabilities" if "IPC_LOCK" in subject.settings.capabilities else f"{where}.capabilities.add"
        who = f"user {uid}" if uid is not None else "a user other than root"
        what = f"IPC_LOCK does nothing for {who}: Kubernetes sets no ambient capabilities, and CapEff stays empty"
        fix = (
            "Remove it. The memlock limit must come from the container runtime (LimitMEMLOCK=infinity of containerd's "
            "or CRI-O's unit, or default_ulimits of CRI-O); `shardtune doctor` in the pod shows it."
        )
        yield warning("ipc-lock", at, what, fix)


def _check_capability(path: str, name: str) -> Iterator[Finding]:
    if name.upper().startswith("CAP_"):
        what = f"{name}: the container runtime puts CAP_ before the name itself"
        yield error("capability", path, what, f"Write {name[4:]}.")
    elif name != "NET_BIND_SERVICE":
        what = (
            f"{name}: refused by `restricted-v2`, and by Pod Security `restricted` (most, IPC_LOCK too, by `baseline`)"
        )
        yield warning("capability", path, what, f"Leave it out if the job runs without. Or: {_SCC}.")


def _check_restricted(pod: Pod) -> Iterator[Finding]:
    path, container = pod.trainer
    of_pod, own = pod.spec.get("securityContext") or {}, container.get("securityContext") or {}
    lacks = [
        name
        for name, given in (
            ("runAsNonRoot", of_pod.get("runAsNonRoot") or own.get("runAsNonRoot")),
            ("seccompProfile", of_pod.get("seccompProfile") or own.get("seccompProfile")),
            ("capabilities.drop: [ALL]", "ALL" in ((own.get("capabilities") or {}).get("drop") or ())),
        )
        if not given
    ]
    if lacks:
        what = f"Kubernetes' Pod Security level `restricted` would refuse the pod: it lacks {', '.join(lacks)}"
        yield notice("pod-security", f"{path}.securityContext", what, _RESTRICTED)
