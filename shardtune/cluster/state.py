"""How is the job doing? One set of states for every kind, computed from the workload's conditions and its pods."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardtune.cluster.manifests import Manifest
from shardtune.cluster.resources import JOB
from shardtune.cluster.workloads import Workload, main_container, newest_by_rank, node_rank
from shardtune.run.exit_codes import EXIT_CODES, KILLED, LOST, TERMINATED

State = Literal["queued", "pending", "running", "restarting", "suspended", "succeeded", "failed", "unknown"]
ENDED = ("succeeded", "failed")
WAITING = "waiting for admission"  # our words where Kueue has none
_SUCCEEDED = ("Complete", "SuccessCriteriaMet", "Completed", "Succeeded")
_FAILED = ("Failed", "FailureTarget")
_RESTARTING = ("Restarting", "RestartingJobSet")
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
# What a node exits with because another one failed: never the cause where there is another.
_CONSEQUENCES = (LOST, TERMINATED, KILLED)


@dataclass(frozen=True)
class Failure:
    """How a container ended, or why a pod did.

    Attributes:
        reason: Kubernetes' word: Error, OOMKilled, Evicted.
        meaning: Of the exit code, in words; empty for one that is not ours.
    """

    pod: str
    node: int
    container: str
    exit_code: int | None
    reason: str
    message: str
    finished: str
    meaning: str = ""

    def __str__(self) -> str:
        code = f"exit code {self.exit_code}" if self.exit_code is not None else self.reason
        named = f" ({self.reason})" if self.exit_code is not None and self.reason not in ("", "Error") else ""
        where = (
            f"node {self.node} (pod {self.pod}, container {self.container})" if self.container else f"pod {self.pod}"
        )
        said = f": {self.meaning or self.message}" if self.meaning or self.message else ""
        return f"{where} ended with {code}{named}{said}"


@dataclass(frozen=True)
class JobStatus:
    """What `jobs` and `status` show.

    Attributes:
        message: Why, in the controller's words.
        ready: Pods that run or have succeeded, of the `nodes` that the job has.
        restarts: Attempts after the first.
    """

    name: str
    namespace: str
    kind: str
    state: State
    message: str
    nodes: int
    ready: int
    restarts: int
    created: str
    started: str | None
    ended: str | None
    queue: str | None
    failure: Failure | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def job_status(workload: Workload, pods: Sequence[Manifest], kueue: Manifest | None = None) -> JobStatus:
    """The state of a job.

    Args:
        pods: All of its pods, oldest first.
        kueue: Kueue's Workload, where the job has a queue and it may be read.
    """
    state, message = _state(workload, pods, kueue)
    current = newest_by_rank(pods)
    failure = first_failure(current.values()) or first_failure(pods) if state in ("failed", "restarting") else None
    return JobStatus(
        name=workload.name,
        namespace=workload.namespace,
        kind=workload.resource.kind,
        state=state,
        message=message,
        nodes=workload.nodes,
        ready=sum(map(_is_up, current.values())),
        restarts=_restarts(workload, pods),
        created=str(workload.manifest["metadata"].get("creationTimestamp") or ""),
        started=_started(workload, pods),
        ended=_ended(workload) if state in ENDED else None,
        queue=workload.queue,
        failure=failure,
    )


def _state(workload: Workload, pods: Sequence[Manifest], kueue: Manifest | None) -> tuple[State, str]:
    """In the order that the kinds' own controllers decide in: what is final first."""
    conditions = _true_conditions(workload)
    for names, state in ((_FAILED, "failed"), (_SUCCEEDED, "succeeded")):
        for name in names:
            if name in conditions:
                return state, _message(conditions[name])  # type: ignore[return-value]
    if workload.suspended:
        return _suspended(workload, kueue)
    for name in _RESTARTING:
        if name in conditions:
            return "restarting", _message(conditions[name])
    current = newest_by_rank(pods)
    up = sum(map(_is_up, current.values()))
    if up and up >= workload.nodes:
        return "running", ""
    if not pods and "Running" in conditions:
        return "running", _message(conditions["Running"])
    counted = f"{up} of {workload.nodes} nodes are running"
    if any((pod.get("status") or {}).get("phase") == "Failed" for pod in current.values()):
        return "restarting", f"{counted}; the next attempt has not begun"
    if _restarts(workload, pods):
        return "restarting", counted
    return "pending", counted if pods else "no pod has been created yet"


def _true_conditions(workload: Workload) -> dict[str, Mapping[str, Any]]:
    found = workload.status.get("conditions") or ()
    return {str(one["type"]): one for one in found if one.get("status") == "True"}


def _message(condition: Mapping[str, Any]) -> str:
    return str(condition.get("message") or condition.get("reason") or "")


def _suspended(workload: Workload, kueue: Manifest | None) -> tuple[State, str]:
    """Kueue suspends what it has not admitted; a job without a queue was suspended by somebody."""
    if workload.queue is None:
        return "suspended", "until it is resumed"
    if kueue is None:
        return "suspended", f"by Kueue (queue {workload.queue}), which has made no Workload for it that you may read"
    if (kueue.get("spec") or {}).get("active") is False:
        return "suspended", "taken out of its queue until it is resumed"
    found = {str(one["type"]): one for one in (kueue.get("status") or {}).get("conditions") or ()}
    for name in ("QuotaReserved", "Admitted", "Evicted"):
        if name in found and found[name].get("status") == ("True" if name == "Evicted" else "False"):
            return "queued", f"{workload.queue}: {_message(found[name])}"
    return "queued", f"{workload.queue}: {WAITING}"


def _is_up(pod: Manifest) -> bool:
    status = pod.get("status") or {}
    if status.get("phase") == "Succeeded":
        return True
    if status.get("phase") != "Running" or pod["metadata"].get("deletionTimestamp"):
        return False
    name = main_container(pod)
    return any(one["name"] == name and "running" in (one.get("state") or {}) for one in _statuses(pod))


def _statuses(pod: Manifest, *, init: bool = False) -> list[Manifest]:
    status = pod.get("status") or {}
    found = list(status.get("containerStatuses") or ())
    return [*(status.get("initContainerStatuses") or ()), *found] if init else found


def _restarts(workload: Workload, pods: Sequence[Manifest]) -> int:
    """Attempts after the first: of the whole set, of a node's pod, or of its container, whichever is more."""
    counts = [int(workload.status.get("restarts") or 0), _failed_attempts(workload)]
    by_rank: dict[int, int] = {}
    for pod in pods:
        rank = node_rank(pod)
        counts.append(int((pod["metadata"].get("labels") or {}).get(_ATTEMPT) or 0))
        name = main_container(pod)
        inside = sum(int(one.get("restartCount") or 0) for one in _statuses(pod) if one["name"] == name)
        by_rank[rank] = by_rank.get(rank, -1) + 1 + inside
    return max([*counts, *by_rank.values()])


def _failed_attempts(workload: Workload) -> int:
    """Of a Job, which counts its failed pods: attempts that failed and were, or will be, followed by another."""
    if workload.resource.kind != JOB.kind:
        return 0
    attempts = math.ceil(int(workload.status.get("failed") or 0) / max(1, workload.nodes))
    is_over = any(name in _true_conditions(workload) for name in _FAILED)
    return max(0, attempts - 1) if is_over else attempts


def pod_state(pod: Manifest) -> str:
    """A pod's phase; where its container waits, for what, and how it last ended: the phase is `Running` then too."""
    phase = str((pod.get("status") or {}).get("phase") or "?")
    name = main_container(pod)
    for one in _statuses(pod):
        reason = ((one.get("state") or {}).get("waiting") or {}).get("reason")
        ended = next((found for found in failures_of(pod) if found.container == name), None)
        if one["name"] == name and reason:
            last = f", last exit code {ended.exit_code}" if ended else ""
            meaning = f": {ended.meaning}" if ended and ended.meaning else ""
            return f"{reason} ({phase}{last}{meaning})"
    return phase


def _started(workload: Workload, pods: Sequence[Manifest]) -> str | None:
    times = [str(pod["status"]["startTime"]) for pod in pods if (pod.get("status") or {}).get("startTime")]
    return str(workload.status.get("startTime") or "") or min(times, default=None)


def _ended(workload: Workload) -> str | None:
    if workload.status.get("completionTime"):
        return str(workload.status["completionTime"])
    conditions = _true_conditions(workload)
    ends = [conditions[name].get("lastTransitionTime") for name in (*_FAILED, *_SUCCEEDED) if name in conditions]
    return str(ends[0]) if ends and ends[0] else None


def first_failure(pods: Iterable[Manifest]) -> Failure | None:
    """What failed first: the cause rather than the nodes that lost it."""
    found = [failure for pod in pods for failure in failures_of(pod)]
    return min(found, key=lambda one: (one.exit_code in _CONSEQUENCES, one.finished), default=None)


def failures_of(pod: Manifest) -> list[Failure]:
    """How its containers failed, now or before their last restart; of an evicted pod, the eviction."""
    name, rank = str(pod["metadata"]["name"]), node_rank(pod)
    status = pod.get("status") or {}
    found: list[Failure] = []
    if status.get("phase") == "Failed" and status.get("reason"):
        message, since = str(status.get("message") or ""), str(status.get("startTime") or "")
        found.append(Failure(name, rank, "", None, str(status["reason"]), message, since))
    for one in _statuses(pod, init=True):
        for when in ("state", "lastState"):
            ended = (one.get(when) or {}).get("terminated")
            if ended and ended.get("exitCode"):
                code = int(ended["exitCode"])
                known = EXIT_CODES.get(code)
                message, finished = str(ended.get("message") or "").strip(), str(ended.get("finishedAt") or "")
                reason = str(ended.get("reason") or "")
                meaning = re.split(r": | \(|; |\. ", known.meaning)[0].rstrip(".") if known else ""
                found.append(Failure(name, rank, str(one["name"]), code, reason, message, finished, meaning))
                break
    return found
