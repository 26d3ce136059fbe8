"""Why is the job pending, or why did it fail? In words, from its pods' conditions and the cluster's events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ApiError
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.resources import CLAIM, EVENT
from shardtune.cluster.state import WAITING, JobStatus, failures_of, first_failure, job_status
from shardtune.cluster.workloads import Workload, find_workload, kueue_workload, newest_by_rank, node_rank, pods_of
from shardtune.run.exit_codes import (
    FAILED,
    INTERRUPTED,
    KILLED,
    LOST,
    NO_PROGRESS,
    OUT_OF_MEMORY,
    PREEMPTED,
    TERMINATED,
    WRONG_INPUT,
)

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
# By exit code: what to do before the job is submitted again.
_BEFORE_RESTART = {
    FAILED: "Whether a restart helps depends on the error there.",
    WRONG_INPUT: "Fix the cause first; restarting alone will not help.",
    OUT_OF_MEMORY: "Change a setting first: the same config would run out of memory again.",
    KILLED: "Check the host's memory first (cluster.memory); restarting alone may not help.",
}
_RESUMABLE = (LOST, PREEMPTED, NO_PROGRESS, INTERRUPTED, TERMINATED)
_CONFIG = ("CreateContainerConfigError", "CreateContainerError")


@dataclass(frozen=True)
class Reason:
    """One thing that keeps the job from running, or ended it.

    Attributes:
        said: Kubernetes' own words, as they came; empty where it said none.
    """

    what: str
    said: str
    fix: str


@dataclass(frozen=True)
class Description:
    status: JobStatus
    reasons: tuple[Reason, ...]
    pods: tuple[Manifest, ...]
    events: tuple[Manifest, ...]


def describe(cluster: Cluster, name: str) -> Description:
    """Everything about a job that explains its state."""
    workload = find_workload(cluster, name)
    pods = pods_of(cluster, workload)
    kueue = kueue_workload(cluster, workload)
    events = _events(cluster, workload, pods)
    status = job_status(workload, pods, kueue)
    options = cluster.options
    reasons = [*job_reasons(workload, status, events, options), *pod_reasons(pods, events, options)]
    if status.state == "pending":
        reasons += claim_reasons(cluster, workload, pods)
    return Description(status, tuple(_unique(reasons)), tuple(newest_by_rank(pods).values()), events)


def _events(cluster: Cluster, workload: Workload, pods: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Of the job, of what its controller made under names that begin with the job's, and of its pods; oldest first."""
    try:
        found = cluster.list_all(EVENT, namespace=workload.namespace)
    except ApiError as error:
        if error.status == 403:
            return ()
        raise
    uids = {workload.uid, *(str(pod["metadata"]["uid"]) for pod in pods)}
    names = re.compile(rf"{re.escape(workload.name)}(-node-\d+(-.*)?|-(master|worker)-\d+|-nodes|-config)?")
    created = str(workload.manifest["metadata"].get("creationTimestamp") or "")
    kept = []
    for event in found:
        about = event.get("involvedObject") or {}
        by_name = names.fullmatch(str(about.get("name") or "")) and _time(event) >= created
        if about.get("uid") in uids or (by_name and about.get("kind") in ("Job", "JobSet", "Workload", "PodGroup")):
            kept.append(event)
    return tuple(sorted(kept, key=_time))


def _time(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    found = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(found or (event.get("metadata") or {}).get("creationTimestamp") or "")


def job_reasons(
    workload: Workload, status: JobStatus, events: Sequence[Manifest], options: str = ""
) -> Iterator[Reason]:
    """What the conditions of the job, its queue and its controllers say."""
    if status.state == "queued":
        yield Reason(
            f"Kueue has not admitted the job to queue '{workload.queue}'.",
            status.message.removeprefix(f"{workload.queue}: ").replace(WAITING, ""),
            "Wait until others end, or ask for less (cluster.nodes, cluster.gpus_per_node).",
        )
    if status.state == "suspended":
        yield Reason("The job is suspended.", "", f"Continue it: shardtune resume {workload.name}{options}.")
    for event in events:
        if event.get("type") != "Warning" or (event.get("involvedObject") or {}).get("kind") == "Pod":
            continue
        yield from _controller_reason(event)
    if status.state == "failed":
        yield Reason("The job failed.", status.message, _after_failure(status, workload, options))


def _after_failure(status: JobStatus, workload: Workload, options: str) -> str:
    code = status.failure.exit_code if status.failure else None
    advice = _BEFORE_RESTART.get(code, "") if code is not None else ""
    if code in _RESUMABLE:
        again = f"shardtune cancel {workload.name}{options}"
        advice = f"Submitting it again (first: {again}) resumes the run from its checkpoint."
    return f"Read its last lines: shardtune logs {workload.name}{options}. {advice}".rstrip()


def _controller_reason(event: Mapping[str, Any]) -> Iterator[Reason]:
    message = str(event.get("message") or "")
    if "exceeded quota" in message:
        yield Reason(
            "The namespace's quota does not allow the pods.", message, "Ask for less, or wait for others to end."
        )
    elif "security context constraint" in message:
        yield Reason(
            "OpenShift's security context constraints refuse the pods.",
            message,
            "Leave cluster.run_as_uid, run_as_gid, fs_group and capabilities unset, or have an administrator allow "
            "them for cluster.service_account.",
        )
    elif "violates PodSecurity" in message:
        yield Reason("The namespace's Pod Security level refuses the pods.", message, "Use cluster.pod_overlay.")
    elif event.get("reason") in ("FailedCreate", "JobCreationFailed", "TrainJobResourcesCreationFailed"):
        yield Reason("The controller cannot create the pods.", message, "Change what its message names.")
    elif event.get("reason") == "PodGroupUnschedulable" or _is_gang(message):
        yield _gang(message)


def pod_reasons(pods: Sequence[Manifest], events: Sequence[Manifest], options: str = "") -> Iterator[Reason]:
    """What keeps each pod from running, or how it failed. Only the pods of the last attempt.

    Args:
        options: Of the commands that are named (`Cluster.options`).
    """
    current = newest_by_rank(pods).values()
    for pod in current:
        status, name = pod.get("status") or {}, f"node {node_rank(pod)} (pod {pod['metadata']['name']})"
        if status.get("phase") == "Pending":
            yield from _scheduling(pod, name, options)
            yield from _mounting(pod, name, events, options)
        containers = (status.get("initContainerStatuses") or ()), (status.get("containerStatuses") or ())
        for init, found in zip((True, False), containers, strict=True):
            for one in found:
                yield from _waiting(one, name, events, pod, init=init, options=options)
    failed = first_failure(current)
    for pod in current:
        for failure in failures_of(pod):
            if failure.reason == "OOMKilled":
                yield Reason(
                    f"{failure.container} of node {failure.node} used more host memory than its limit (OOMKilled).",
                    failure.message or "OOMKilled",
                    "Raise cluster.memory (the plan says what a run needs: shardtune plan), or lower data workers.",
                )
            elif failure.reason in ("Evicted", "Preempting", "NodeShutdown", "Terminated"):
                yield Reason(
                    f"Node {failure.node} was evicted: the cluster took its machine or its disk was full.",
                    failure.message or failure.reason,
                    "The run resumes from its checkpoint when the job restarts; set cluster.ephemeral_storage if the "
                    "disk was full.",
                )
            elif failure == failed:
                yield Reason(f"{str(failure)[:1].upper()}{str(failure)[1:]}.".replace("..", "."), failure.message, "")


def _scheduling(pod: Manifest, name: str, options: str) -> Iterator[Reason]:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        message = str(condition.get("message") or "")
        if _is_gang(message):
            yield _gang(message)
        elif "persistentvolumeclaim" in message and "not found" in message:
            missing = re.search(r'persistentvolumeclaim "([^"]+)" not found', message)
            claim = f"'{missing[1]}' " if missing else ""
            yield Reason(
                f"The PersistentVolumeClaim {claim}does not exist in this namespace.",
                message,
                "Create it, or correct cluster.volumes.",
            )
        elif "unbound immediate PersistentVolumeClaims" in message:
            yield Reason(
                f"A PersistentVolumeClaim of {name} has no volume yet.",
                message,
                f"Look at it (kubectl describe pvc{options}); its storage class must exist and have room.",
            )
        elif condition.get("reason") == "SchedulingGated":
            yield Reason(
                f"{name} is held back by a scheduling gate.", message, "Kueue or the site's scheduler opens it."
            )
        else:
            yield Reason(f"No machine fits {name}: {_shortage(message)}.", message, _shortage_fix(message))


def _shortage(message: str) -> str:
    """What is missing, from the scheduler's sentence."""
    words = [f"not enough {name}" for name in dict.fromkeys(re.findall(r"Insufficient ([\w./-]+\w)", message))]
    for taint in dict.fromkeys(re.findall(r"untolerated taint[s]? \{([^}]*)\}", message)):
        words.append(f"a taint that the pods do not tolerate ({taint})")
    if "node affinity/selector" in message or "node selector" in message:
        words.append("no machine has the labels of cluster.node_selector or affinity")
    if "volume node affinity conflict" in message:
        words.append("the volume is in another zone")
    if "unschedulable" in message.lower() and not words:
        words.append("machines are cordoned")
    return ", ".join(words) or "see the scheduler's words"


def _shortage_fix(message: str) -> str:
    advice = []
    if "Insufficient" in message:
        advice.append("Wait until others end, or ask for less than one machine has (kubectl describe nodes).")
    if "taint" in message:
        advice.append("Add the taint to cluster.tolerations if the machines are meant for you.")
    if "node affinity/selector" in message:
        advice.append("Correct cluster.node_selector.")
    return " ".join(advice) or "Ask the cluster's administrator."


def _is_gang(message: str) -> bool:
    return re.search(r"\bgang\b|pod ?group", message, re.IGNORECASE) is not None


def _gang(message: str) -> Reason:
    return Reason(
        "Not all pods can start at once, so none does (gang scheduling).",
        message,
        "Wait until enough machines are free, or lower cluster.nodes.",
    )


def _mounting(pod: Manifest, name: str, events: Sequence[Manifest], options: str) -> Iterator[Reason]:
    """Volumes, ConfigMaps and Secrets that the kubelet could not mount."""
    for event in _events_of(pod, events):
        if event.get("reason") not in ("FailedMount", "FailedAttachVolume"):
            continue
        message = str(event.get("message") or "")
        missing = re.search(r'(configmap|secret) "([^"]+)" not found', message)
        if missing:
            yield Reason(
                f"The {missing[1]} '{missing[2]}' that {name} mounts does not exist.",
                message,
                "If it belongs to the job, cancel the job and submit it again; otherwise create it.",
            )
        else:
            yield Reason(
                f"A volume of {name} cannot be mounted.", message, f"Look at its claim: kubectl describe pvc{options}."
            )


def _events_of(pod: Manifest, events: Sequence[Manifest]) -> list[Manifest]:
    uid = pod["metadata"]["uid"]
    return [event for event in events if (event.get("involvedObject") or {}).get("uid") == uid]


def _waiting(
    status: Manifest, name: str, events: Sequence[Manifest], pod: Manifest, *, init: bool, options: str
) -> Iterator[Reason]:
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    container = f"init container {status['name']}" if init else f"container {status['name']}"
    if reason in _PULL:
        said = " ".join(
            dict.fromkeys(
                [
                    message,
                    *(str(one.get("message")) for one in _events_of(pod, events) if one.get("reason") == "Failed"),
                ]
            )
        )
        yield _pull(str(status.get("image") or "the image"), name, said)
    elif reason in _CONFIG:
        missing = re.search(r'(secret|configmap) "([^"]+)" not found', message)
        key = re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)", message)
        what = f"{container} of {name} cannot be configured"
        if missing:
            what = f"The {missing[1]} '{missing[2]}' that {name} needs does not exist"
        elif key:
            what = f"The {key[2]} {key[3].rpartition('/')[2]} has no key {key[1]}, which {name} needs"
        yield Reason(f"{what}.", message, "Create it, or correct cluster.secret_env / env_from_secrets.")
    elif reason == "CrashLoopBackOff":
        what = f"{container} of {name} fails again and again".replace("container init", "init")
        fix = "Its init container checks the machine: its log says what is wrong." if init else "Read its log."
        yield Reason(f"{what[:1].upper()}{what[1:]}.", message, fix)
    ended = (status.get("state") or {}).get("terminated") or {}
    if init and ended.get("exitCode"):
        yield Reason(
            f"The {container} of {name} failed with exit code {ended['exitCode']}, so training did not start.",
            str(ended.get("message") or ended.get("reason") or ""),
            f"Read its log: kubectl logs {pod['metadata']['name']} -c {status['name']}{options}.",
        )


def _pull(image: str, name: str, said: str) -> Reason:
    if re.search(r"unauthorized|denied|authentication|forbidden|401|403", said, re.IGNORECASE):
        fix = "Name a Secret for the registry: cluster.image_pull_secrets. (Registries also answer so to wrong names.)"
        return Reason(f"The registry does not let {name} pull '{image}'.", said, fix)
    if re.search(r"not found|manifest unknown|does not exist|404", said, re.IGNORECASE):
        return Reason(f"The image '{image}' of {name} does not exist.", said, "Correct cluster.image.")
    if re.search(r"timeout|no such host|connection refused|dial tcp|i/o", said, re.IGNORECASE):
        fix = "Use an image from a registry that the cluster reaches (cluster.image)."
        return Reason(f"The machine cannot reach the registry of '{image}'.", said, fix)
    return Reason(f"{name} cannot pull '{image}'.", said, "Correct cluster.image or cluster.image_pull_secrets.")


def claim_reasons(cluster: Cluster, workload: Workload, pods: Sequence[Manifest]) -> Iterator[Reason]:
    """Claims of the pods that are missing or not bound."""
    volumes = [volume for pod in pods for volume in pod["spec"].get("volumes") or ()]
    claims = dict.fromkeys(
        str(one["persistentVolumeClaim"]["claimName"]) for one in volumes if "persistentVolumeClaim" in one
    )
    for name in claims:
        try:
            claim = cluster.find(CLAIM, name, workload.namespace)
        except ApiError as error:
            if error.status == 403:
                return
            raise
        phase = str(((claim or {}).get("status") or {}).get("phase") or "")
        if claim is None:
            what, fix = (
                f"The PersistentVolumeClaim '{name}' does not exist in this namespace.",
                "Create it, or correct ",
            )
            yield Reason(what, "", f"{fix}cluster.volumes.")
        elif phase != "Bound":
            yield Reason(
                f"The PersistentVolumeClaim '{name}' is not bound ({phase or 'no phase'}).",
                "",
                f"Look at it: kubectl describe pvc {name}{cluster.options}. With WaitForFirstConsumer it is bound when "
                "a pod is placed.",
            )


def _unique(reasons: Sequence[Reason]) -> list[Reason]:
    """Without repeats: three pods that lack the same claim are one reason."""
    found: dict[str, Reason] = {}
    for one in reasons:
        found.setdefault(one.what, one)
    return list(found.values())
