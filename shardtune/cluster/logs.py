"""What do all nodes of a job print? Their logs as one, each line with its node's rank, until the job ends.

Lines carry the timestamps that the nodes gave them. After a lost connection a log is read again from the last one that
was seen, and what was seen already is left out: nothing is printed twice, nothing is skipped.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ApiError, ClusterError
from shardtune.cluster.connection_errors import StreamCutError
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.resources import POD
from shardtune.cluster.state import ENDED, JobStatus, job_status
from shardtune.cluster.workloads import Workload, find_workload, kueue_workload, main_container, node_rank, pods_of
from shardtune.errors import ShardtuneError, UserInputError

_POLL_SECONDS = 2.0
_RECONNECT_SECONDS = 1.0
_GIVE_UP_SECONDS = 300.0  # without an answer of the API server
_DRAIN_SECONDS = 30.0  # for the last lines of pods that have ended


@dataclass(frozen=True)
class Line:
    """A line of a node, or (`note`) one of ours about it."""

    node: int
    text: str
    time: str = ""
    note: bool = False


@dataclass
class Position:
    """How far a log was read: the last timestamp, and how many lines that carry it were seen."""

    time: str = ""
    lines: int = 0
    _skip: int = field(default=0, repr=False)

    def reopen(self) -> str | None:
        """What to ask for: everything since the last timestamp, whose lines will come again."""
        self._skip = self.lines
        return self.time or None

    def accept(self, stamp: str) -> bool:
        """Whether a line with this timestamp is new."""
        if self.time and _sortable(stamp) < _sortable(self.time):
            return False
        if stamp != self.time:
            self.time, self.lines, self._skip = stamp, 1, 0
            return True
        if self._skip:
            self._skip -= 1
            return False
        self.lines += 1
        return True


def _sortable(stamp: str) -> str:
    """RFC 3339 with a fraction of any length, such that text order is time order."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def split_line(raw: bytes) -> tuple[str, str]:
    """Timestamp and text of a line of the log API."""
    stamp, _, text = raw.decode("utf-8", "replace").partition(" ")
    return stamp, text.rstrip("\r")


class PodFollower:
    """Follows one pod's log through reconnects and restarts of its container, in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        pod: Manifest,
        since_seconds: int | None,
        emit: Callable[[Line], None],
        after: PodFollower | None = None,
    ) -> None:
        """Args:
        after: Of the node's earlier pod, whose lines come first.
        """
        self._cluster, self._emit, self._since, self._after = cluster, emit, since_seconds, after
        self._name, self._namespace = str(pod["metadata"]["name"]), str(pod["metadata"]["namespace"])
        self._container, self.node = main_container(pod), node_rank(pod)
        self._uid = str(pod["metadata"]["uid"])
        self._position = Position()
        self._restarts = 0  # of the container when its log was last opened
        self.thread = threading.Thread(target=self._run, name=f"log of {self._name}", daemon=True)

    def _run(self) -> None:
        failing_since: float | None = None
        if self._after is not None:
            self._after.thread.join(_DRAIN_SECONDS)  # it may still be terminating when its successor exists
        while True:
            try:
                if self._read_once():
                    return
                failing_since = None
            except ApiError as error:
                if error.status == 404:
                    return
                if error.status in (401, 403):
                    self._emit(Line(self.node, f"{error.what} {error.why}", note=True))
                    return
            except ClusterError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > _GIVE_UP_SECONDS:
                    self._emit(Line(self.node, f"{error.what} {error.why}", note=True))
                    return
            time.sleep(_RECONNECT_SECONDS)

    def _read_once(self) -> bool:
        """Read until the log or the connection ends; True when there will be no more lines."""
        pod = self._cluster.get(POD, self._name, self._namespace)
        if str(pod["metadata"]["uid"]) != self._uid:  # a PyTorchJob's new pod has the old one's name
            return True
        status = container_status(pod, self._container)
        state = status.get("state") or {}
        has_ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if not state or ("waiting" in state and not status.get("restartCount")):
            return has_ended  # it has not started, and of an evicted pod it never will
        restarts = int(status.get("restartCount") or 0)
        try:
            if restarts > self._restarts:
                self._finish_previous(restarts)
            self._restarts = restarts
            return self._stream(previous=False, follow="running" in state) and has_ended
        except StreamCutError:
            return False

    def _finish_previous(self, restarts: int) -> None:
        """What the container wrote before its restart and we have not seen."""
        try:
            self._stream(previous=True, follow=False)
        except ApiError as error:
            if error.status not in (400, 404):
                raise
        self._emit(Line(self.node, f"container restarted ({restarts})", note=True))

    def _stream(self, *, previous: bool, follow: bool) -> bool:
        """Read a log to its end; False if the container restarted meanwhile, so that it may be another one's."""
        since = self._position.reopen()
        with self._cluster.pod_log(
            self._name, self._container, namespace=self._namespace, follow=follow, previous=previous,
            since_time=since, since_seconds=None if since else self._since,
        ) as lines:  # fmt: skip
            if follow and self._has_restarted():
                return False  # before a line was read: what its predecessor wrote comes first
            for raw in lines:
                stamp, text = split_line(raw)
                if self._position.accept(stamp):
                    self._emit(Line(self.node, text, stamp))
        return True

    def _has_restarted(self) -> bool:
        pod = self._cluster.get(POD, self._name, self._namespace)
        return int(container_status(pod, self._container).get("restartCount") or 0) != self._restarts


def container_status(pod: Manifest, name: str) -> Manifest:
    found = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((one for one in found if one["name"] == name), {})


def follow(cluster: Cluster, name: str, *, node: int | None, since_seconds: int | None) -> Iterator[Line | JobStatus]:
    """All lines of a job as they come, last its final status.

    Raises:
        ShardtuneError: the job was deleted, or the API server has been silent for minutes.
    """
    lines: queue.Queue[Line] = queue.Queue(maxsize=10_000)
    followers: dict[str, PodFollower] = {}
    workload = find_workload(cluster, name)
    if node is not None and node >= workload.nodes:
        raise UserInputError(f"The job '{name}' has no node {node}.", fix=f"Its nodes are 0 to {workload.nodes - 1}.")
    ended: JobStatus | None = None
    waiting, silent_since = "", None
    while ended is None:
        try:
            workload = _again(cluster, workload)
            pods = pods_of(cluster, workload)
            status = job_status(workload, pods, kueue_workload(cluster, workload) if workload.suspended else None)
            silent_since = None
        except ApiError:
            raise
        except ClusterError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _GIVE_UP_SECONDS:
                raise
            yield from _drain(lines, _POLL_SECONDS)
            continue
        yield from _start_followers(cluster, pods, followers, lines.put, node, since_seconds)
        told = f"{status.state}: {status.message}" if status.state not in ("running", *ENDED) else ""
        if told and told != waiting:
            yield Line(-1, told, note=True)
        waiting = told
        ended = status if status.state in ENDED else None
        yield from _drain(lines, _POLL_SECONDS if ended is None else 0)
    deadline = time.monotonic() + _DRAIN_SECONDS
    while any(one.thread.is_alive() for one in followers.values()) and time.monotonic() < deadline:
        yield from _drain(lines, 0.2)
    yield from _drain(lines, 0)
    yield ended


def _again(cluster: Cluster, workload: Workload) -> Workload:
    found = cluster.find(workload.resource, workload.name, workload.namespace)
    if found is None or str(found["metadata"]["uid"]) != workload.uid:
        raise ShardtuneError(f"The job '{workload.name}' was deleted.")
    return Workload(workload.resource, found)


def _start_followers(
    cluster: Cluster, pods: list[Manifest], followers: dict[str, PodFollower], emit: Callable[[Line], None],
    node: int | None, since_seconds: int | None,
) -> Iterator[Line]:  # fmt: skip
    """A follower for each pod that has none. A node's second pod is announced."""
    for pod in pods:
        uid, rank = str(pod["metadata"]["uid"]), node_rank(pod)
        if uid in followers or node not in (None, rank):
            continue
        earlier = [one for one in followers.values() if one.node == rank]
        if earlier:
            yield Line(rank, f"continues in pod {pod['metadata']['name']}", note=True)
        followers[uid] = PodFollower(cluster, pod, since_seconds, emit, earlier[-1] if earlier else None)
        followers[uid].thread.start()


def _drain(lines: queue.Queue[Line], seconds: float) -> Iterator[Line]:
    """What has come, and what comes within `seconds`."""
    until = time.monotonic() + seconds
    while not seconds or time.monotonic() < until:  # also while lines pour in: pods have to be looked for
        try:
            yield lines.get(timeout=max(0.0, until - time.monotonic())) if seconds else lines.get_nowait()
        except queue.Empty:
            return


def read_logs(cluster: Cluster, name: str, *, node: int | None, since_seconds: int | None) -> Iterator[Line]:
    """What has been printed until now, of all pods and earlier attempts, in the order of the timestamps."""
    workload = find_workload(cluster, name)
    if node is not None and node >= workload.nodes:
        raise UserInputError(f"The job '{name}' has no node {node}.", fix=f"Its nodes are 0 to {workload.nodes - 1}.")
    pods = [pod for pod in pods_of(cluster, workload) if node in (None, node_rank(pod))]
    if not pods:
        status = job_status(workload, [], kueue_workload(cluster, workload) if workload.suspended else None)
        yield Line(-1, f"no pods: the job is {status.state} ({status.message})", note=True)
        return
    streams = [_lines_of(cluster, pod, since_seconds) for pod in pods]
    yield from heapq.merge(*streams, key=lambda line: _sortable(line.time))


def _lines_of(cluster: Cluster, pod: Manifest, since_seconds: int | None) -> Iterator[Line]:
    container, rank = main_container(pod), node_rank(pod)
    status = container_status(pod, container)
    name, namespace = str(pod["metadata"]["name"]), str(pod["metadata"]["namespace"])
    last = ""
    for previous in (True, False) if status.get("restartCount") else (False,):
        try:
            with cluster.pod_log(
                name, container, namespace=namespace, previous=previous, since_seconds=since_seconds
            ) as lines:
                for raw in lines:
                    last, text = split_line(raw)
                    yield Line(rank, text, last)
        except ApiError as error:
            if error.status not in (400, 404):
                raise
            if not previous:
                yield Line(rank, _not_started(pod, error), last, note=True)


def _not_started(pod: Manifest, error: ApiError) -> str:
    name = pod["metadata"]["name"]
    if error.status == 404:
        return f"pod {name} is gone"
    return f"pod {name} has printed nothing yet: {error.message}"
