"""Nodes that meet, each in a thread of this process, over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardtune.config.schema import RunConfig
from shardtune.errors import UserInputError
from shardtune.launch.link import Link, MasterLostError, wait_for_master
from shardtune.launch.meeting import Facts, Met, differences, digests, meet
from shardtune.launch.place import Node


def nothing() -> None:
    pass


def silent(text: str) -> None:
    pass


def facts(node: int, nnodes: int = 3, **more: object) -> Facts:
    return Facts(node, nnodes, nproc=2, host=f"host{node}", versions={"torch": "2.13"}, settings={"a.b": "1"}, **more)  # type: ignore[arg-type]


class Meeting:
    """Starts a thread per node; `result[i]` is what became of the i-th."""

    def __init__(self) -> None:
        self.master = Link.host(0, everywhere=False)
        self.result: dict[int, Met | Exception] = {}
        self._threads: list[threading.Thread] = []

    def join(self, said: Facts, *, attempt: int = 0, seconds: float = 20, link: Link | None = None) -> int:
        key = len(self._threads)

        def run() -> None:
            own = link or (self.master if said.node == 0 else Link.connect("127.0.0.1", self.master.port))
            node = Node(said.nnodes, said.node, "127.0.0.1", self.master.port)
            try:
                self.result[key] = meet(own, said, node, attempt, seconds, silent, nothing)
            except (UserInputError, MasterLostError) as error:
                self.result[key] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return key

    def end(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def problem(self, key: int) -> UserInputError:
        error = self.result[key]
        assert isinstance(error, UserInputError), error
        return error


def test_nodes_that_come_in_any_order_get_their_ranks() -> None:
    meeting = Meeting()
    for node in (2, 0, 1):
        meeting.join(replace(facts(node), nproc=node + 1))
    meeting.end()
    seats = {met.seat.node: met.seat for met in meeting.result.values() if isinstance(met, Met)}
    assert [(seats[n].first_rank, seats[n].nproc, seats[n].world_size) for n in range(3)] == [
        (0, 1, 6),
        (1, 2, 6),
        (3, 3, 6),
    ]


def test_another_number_of_nodes_is_told_on_both_sides() -> None:
    meeting = Meeting()
    keys = [meeting.join(facts(0)), meeting.join(facts(1, nnodes=2))]
    meeting.end()
    for key in keys:
        assert "node 1 (host1) was started with --nnodes 2, the master with 3" in meeting.problem(key).what


def test_two_nodes_with_one_number_are_told_apart_by_name() -> None:
    meeting = Meeting()
    meeting.join(facts(0))
    meeting.join(facts(1))
    meeting.join(replace(facts(1), host="other"))
    meeting.end()
    assert all("Two nodes were started as node 1" in meeting.problem(key).what for key in range(3))
    assert "other" in meeting.problem(0).what and "host1" in meeting.problem(0).what


def test_versions_and_settings_that_differ_are_named_on_every_node() -> None:
    meeting = Meeting()
    meeting.join(facts(0, nnodes=2))
    meeting.join(replace(facts(1, nnodes=2), versions={"torch": "2.11"}, settings={"a.b": "2"}))
    meeting.end()
    for key in range(2):
        why = meeting.problem(key).why
        assert "torch is 2.11 on node 1 (host1) and 2.13 on node 0 (host0)" in why
        assert "the config of node 1 (host1) has another a.b" in why


def test_a_node_that_does_not_come_is_named() -> None:
    meeting = Meeting()
    keys = [meeting.join(facts(0), seconds=2), meeting.join(facts(1))]
    meeting.end()
    for key in keys:
        assert meeting.problem(key).what.startswith("Node 2 did not come within")


def test_a_second_start_waits_for_the_masters_next_attempt() -> None:
    meeting = Meeting()
    link = Link.connect("127.0.0.1", meeting.master.port)
    one = facts(1, nnodes=2)
    meeting.join(facts(0, nnodes=2))
    meeting.join(one, link=link)
    meeting.end()
    again = meeting.join(one, attempt=1, link=link)
    time.sleep(0.5)
    assert again not in meeting.result, "it took the old attempt for the new one"
    meeting.join(facts(0, nnodes=2), attempt=1)
    meeting.end()
    met = meeting.result[again]
    assert isinstance(met, Met) and met.seat.attempt == 1


def test_a_node_that_was_started_anew_waits_until_its_old_self_is_given_up() -> None:
    meeting = Meeting()
    meeting.join(facts(0, nnodes=2))
    meeting.join(facts(1, nnodes=2))
    meeting.end()
    anew = meeting.join(facts(1, nnodes=2))
    meeting.join(facts(0, nnodes=2), attempt=1)
    meeting.end()
    met = meeting.result[anew]
    assert isinstance(met, Met) and met.seat.attempt == 1


def config(**model: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"model_name_or_path": "m", **model}, "data": {"dataset_name_or_path": "d"}}
    )


def test_digests_name_the_setting_and_hide_its_value() -> None:
    mine, its = digests(config()), digests(config(revision="secret"))
    assert {key for key in mine if mine[key] != its[key]} == {"model.revision"}
    assert "secret" not in str(its) and "parallel.nproc" not in mine


def test_equal_nodes_do_not_differ() -> None:
    assert differences([facts(0), facts(1), facts(2)]) == []


def test_a_port_that_is_taken_is_told_before_anything_waits() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserInputError) as caught:
            Link.host(port, everywhere=True)
    assert f"cannot listen on port {port}" in caught.value.what and "--master-port" in caught.value.fix


def test_a_run_on_one_machine_listens_on_loopback_alone() -> None:
    link = Link.host(0, everywhere=False)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = [line[1] for line in lines if line[1].endswith(f":{link.port:04X}") and line[3] == "0A"]
    assert local == [f"0100007F:{link.port:04X}"]


@pytest.mark.parametrize(
    ("host", "words"),
    [("127.0.0.1", "nothing listens on port"), ("no-such-host.invalid", "does not resolve")],
)
def test_a_master_that_cannot_be_reached_is_told_with_the_reason(host: str, words: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UserInputError) as caught:
        wait_for_master(host, port, 0.5, silent, nothing)
    assert words in caught.value.why and "was not reached within" in caught.value.what


def test_a_master_that_comes_later_is_waited_for() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server: list[socket.socket] = []
    threading.Timer(1.0, lambda: server.append(socket.create_server(("127.0.0.1", port)))).start()
    wait_for_master("127.0.0.1", port, 30, silent, nothing)
    assert server
    server[0].close()


def test_a_store_that_does_not_answer_does_not_hold_the_launcher() -> None:
    link = Link.host(0, everywhere=False)
    hang: Callable[[object], None] = lambda store: time.sleep(60)  # noqa: E731
    with pytest.raises(MasterLostError):
        link.call(hang, 0.3)
    assert link.silent_for() > 0.2
