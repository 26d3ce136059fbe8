"""The logs of all nodes as one: no line twice, none lost, through cut connections and restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from api_server import ApiServer, ContainerLog
from cluster_objects import PLURALS, pod, workload

from shardtune.cluster import logs
from shardtune.cluster.api import Cluster
from shardtune.cluster.logs import Line, Position, follow, read_logs
from shardtune.cluster.state import JobStatus
from shardtune.errors import ShardtuneError, UserInputError

Kube = Callable[..., Any]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(logs, "_RECONNECT_SECONDS", 0.02)


def end_job(server: ApiServer, condition: str = "Complete", **changes: Any) -> None:
    """The pods end, then the job."""
    for one in server.of("pods"):
        server.log(one["metadata"]["name"]).ended = True
        if one["status"]["phase"] == "Running":
            phase = "Succeeded" if condition == "Complete" else "Failed"
            code = 0 if condition == "Complete" else 1
            over = pod(0, phase, exit_code=code, name=one["metadata"]["name"])["status"]
            server.put("pods", {**one, "status": over})
    job = server.of("jobs")[0]
    server.put("jobs", {**job, "status": workload("Job", (condition, "it ended"))["status"]})


def collect(found: Iterator[Line | JobStatus]) -> tuple[dict[int, list[str]], JobStatus | None, list[str]]:
    texts: dict[int, list[str]] = {}
    notes: list[str] = []
    end = None
    for one in found:
        if isinstance(one, JobStatus):
            end = one
        elif one.note:
            notes.append(one.text)
        else:
            texts.setdefault(one.node, []).append(one.text)
    return texts, end, notes


def started(server: ApiServer, nodes: int = 2) -> list[ContainerLog]:
    server.put("jobs", workload(nodes=nodes))
    return [
        server.log(server.put("pods", pod(rank, name=f"ft-{rank}-aaaaa"))["metadata"]["name"]) for rank in range(nodes)
    ]


def when(condition: Callable[[], object], action: Callable[[], object]) -> None:
    """In a thread: do it as soon as the condition holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.005)
        action()

    threading.Thread(target=wait, daemon=True).start()


def lists_of_pods(server: ApiServer) -> int:
    return sum("/pods?" in path for _, path in server.requests)


def test_all_nodes_are_followed_until_the_job_ends(server: ApiServer, cluster: Cluster) -> None:
    first, second = started(server)
    first.add("a", "b")
    second.add("x")

    def go_on() -> None:
        second.add("y", "z")
        end_job(server)

    when(lambda: first.requests and second.requests, go_on)
    texts, end, _ = collect(follow(cluster, "ft", node=None, since_seconds=None))
    assert texts == {0: ["a", "b"], 1: ["x", "y", "z"]}
    assert end is not None
    assert end.state == "succeeded"


def test_a_cut_connection_neither_loses_nor_repeats_lines(server: ApiServer, cluster: Cluster) -> None:
    (log,) = started(server, nodes=1)
    texts = [f"step {number}" for number in range(40)]
    log.add(*texts[:20])
    log.cut_after = [3, 0, 7, 1, 15]

    def go_on() -> None:
        log.add(*texts[20:])
        end_job(server)

    when(lambda: len(log.requests) > 5, go_on)
    found, _, _ = collect(follow(cluster, "ft", node=None, since_seconds=None))
    assert found == {0: texts}
    assert len(log.requests) >= 6
    assert log.requests[-1].get("sinceTime")


def test_lines_of_the_same_instant_are_told_apart_by_their_number(server: ApiServer, cluster: Cluster) -> None:
    (log,) = started(server, nodes=1)
    log.add("same", "same", "other", "same", stamp="2026-09-01T10:00:00.000000001Z")
    log.cut_after = [1, 2, 3]
    when(lambda: len(log.requests) > 3, lambda: end_job(server))
    found, _, _ = collect(follow(cluster, "ft", node=None, since_seconds=None))
    assert found == {0: ["same", "same", "other", "same"]}


def test_a_container_that_restarts_goes_on_in_the_same_pod(server: ApiServer, cluster: Cluster) -> None:
    (log,) = started(server, nodes=1)
    log.add("one", "two", "three")
    log.cut_after = [2]  # the connection breaks, and before it is back the container has restarted

    def restart() -> None:
        with server.lock:
            found = server.of("pods")[0]
            name, uid = found["metadata"]["name"], found["metadata"]["uid"]
            again = pod(0, restarts=1, exit_code=1, name=name)
            again["metadata"]["uid"] = uid
            server.put("pods", again)
            log.restart()
            log.add("four")

    when(lambda: log.requests, restart)
    when(lambda: log.previous and len(log.requests) > 2, lambda: end_job(server))
    found, _, notes = collect(follow(cluster, "ft", node=None, since_seconds=None))
    assert found == {0: ["one", "two", "three", "four"]}
    assert any("container restarted" in note for note in notes)


def test_a_new_pod_of_the_same_node_continues_its_log(server: ApiServer, cluster: Cluster) -> None:
    (log,) = started(server, nodes=1)
    log.add("first attempt")

    def replace() -> None:
        old = server.of("pods")[0]
        log.ended = True
        server.put("pods", {**old, "status": pod(0, "Failed", exit_code=75, name=old["metadata"]["name"])["status"]})
        server.put("pods", pod(0, name="ft-0-bbbbb", created="2026-09-01T10:40:00Z"))
        server.log("ft-0-bbbbb").add("second attempt")

    when(lambda: log.requests, replace)
    when(lambda: server.log("ft-0-bbbbb").requests, lambda: end_job(server))
    found, end, notes = collect(follow(cluster, "ft", node=None, since_seconds=None))
    assert found == {0: ["first attempt", "second attempt"]}
    assert "continues in pod ft-0-bbbbb" in notes
    assert end is not None
    assert end.restarts == 1


def test_a_pod_that_has_not_started_is_waited_for(server: ApiServer, cluster: Cluster) -> None:
    server.put("jobs", workload(nodes=1))
    waiting = server.put("pods", pod(0, "Pending", name="ft-0-aaaaa"))

    def start() -> None:
        running = pod(0, name="ft-0-aaaaa")
        running["metadata"]["uid"] = waiting["metadata"]["uid"]
        server.put("pods", running)
        server.log("ft-0-aaaaa").add("up")

    when(lambda: lists_of_pods(server) > 1, start)
    when(lambda: server.log("ft-0-aaaaa").requests, lambda: end_job(server))
    found, _, notes = collect(follow(cluster, "ft", node=None, since_seconds=None))
    assert found == {0: ["up"]}
    assert "pending: 0 of 1 nodes are running" in notes


def test_a_job_that_is_deleted_while_it_is_followed_ends_with_an_error(server: ApiServer, cluster: Cluster) -> None:
    started(server, nodes=1)
    when(lambda: lists_of_pods(server) > 1, lambda: server.delete("jobs", "ml", "ft", {}))
    with pytest.raises(ShardtuneError, match="was deleted"):
        collect(follow(cluster, "ft", node=None, since_seconds=None))


def test_one_node_can_be_chosen_and_must_exist(server: ApiServer, cluster: Cluster) -> None:
    first, second = started(server)
    first.add("a")
    second.add("b")
    assert [line.text for line in read_logs(cluster, "ft", node=1, since_seconds=None)] == ["b"]
    with pytest.raises(UserInputError, match="no node 5"):
        list(read_logs(cluster, "ft", node=5, since_seconds=None))


def test_without_following_lines_come_in_the_order_of_their_time(server: ApiServer, cluster: Cluster) -> None:
    first, second = started(server)
    for log, second_of, text in ((first, 1, "a"), (second, 2, "b"), (first, 3, "c"), (second, 4, "d")):
        log.add(text, stamp=f"2026-09-01T10:00:0{second_of}Z")
    found = [(line.node, line.text) for line in read_logs(cluster, "ft", node=None, since_seconds=None)]
    assert found == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]


def test_fractions_of_a_second_of_any_length_are_ordered() -> None:
    position = Position("2026-09-01T10:00:00.5Z", 1)
    assert not position.accept("2026-09-01T10:00:00.25Z")
    assert position.accept("2026-09-01T10:00:00.500000001Z")


def test_the_exit_code_of_following_tells_success_from_failure(server: ApiServer, kube: Kube) -> None:
    (log,) = started(server, nodes=1)
    log.add("boom")
    end_job(server, "Failed")
    done = kube("logs", "-f", "ft")
    assert (done.returncode, done.stdout) == (1, "[0] boom\n")
    assert "has failed: node 0" in done.stderr
    assert "exit code 1" in done.stderr


@pytest.mark.parametrize("kind", PLURALS)
def test_logs_of_every_kind_are_found(kind: str, server: ApiServer, kube: Kube) -> None:
    server.put(PLURALS[kind], workload(kind))
    for rank in (0, 1):
        name = server.put("pods", pod(rank, kind=kind))["metadata"]["name"]
        server.log(name).add(f"from {rank}")
    assert kube("logs", "ft").stdout == "[0] from 0\n[1] from 1\n"


def test_logs_of_a_job_that_does_not_exist_name_the_namespace(kube: Kube) -> None:
    done = kube("logs", "-f", "nope")
    assert done.returncode == 2
    assert "There is no job 'nope' in namespace 'ml' (context 'lab')." in done.stderr


def test_a_pod_that_has_not_started_is_named_where_nothing_is_followed(server: ApiServer, kube: Kube) -> None:
    server.put("jobs", workload(nodes=1))
    server.put("pods", pod(0, "Pending", name="ft-0-aaaaa"))
    done = kube("logs", "ft")
    assert (done.returncode, done.stdout) == (0, "")
    assert "pod ft-0-aaaaa has printed nothing yet" in done.stderr


def test_since_needs_a_unit_that_exists(kube: Kube) -> None:
    assert "is not a time" in kube("logs", "ft", "--since", "5q").stderr
