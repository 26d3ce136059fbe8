"""Nodes that meet, each in a thread of this process, over loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardtune.config.schema import RunConfig
from shardtune.errors import UserInputError
from shardtune.launch.control_connection import ControlConnection, MasterConnection, MasterLostError, NodeConnection
from shardtune.launch.network import Network
from shardtune.launch.process_role import Node
from shardtune.launch.rendezvous import NodeGroup, rendezvous
from shardtune.run.node_facts import NodeFacts, differences, digests

NETWORK = Network(b"key", "127.0.0.1")


def nothing() -> None:
    pass


def silent(text: str) -> None:
    pass


def facts(node: int, nnodes: int = 3, **more: object) -> NodeFacts:
    return NodeFacts(
        node, nnodes, nproc=2, host=f"host{node}", versions={"torch": "2.13"}, settings={"a.b": "1"}, **more
    )  # type: ignore[arg-type]


class Meeting:
    """Starts a thread per node; `result[i]` is what became of the i-th."""

    def __init__(self) -> None:
        self.master = MasterConnection(Node(3), NETWORK, silent)
        self.result: dict[int, NodeGroup | Exception] = {}
        self._threads: list[threading.Thread] = []
        self._links: list[ControlConnection] = [self.master]

    def connect(self) -> NodeConnection:
        control = NodeConnection.join(Node(3, 1, "127.0.0.1", self.master.port), NETWORK, 20, silent, nothing)
        self._links.append(control)
        return control

    def join(
        self, said: NodeFacts, *, attempt: int = 0, seconds: float = 20, control: ControlConnection | None = None
    ) -> int:
        key = len(self._threads)

        def run() -> None:
            own = control or (self.master if said.node == 0 else self.connect())
            node = Node(said.nnodes, said.node, "127.0.0.1", self.master.port)
            try:
                self.result[key] = rendezvous(own, said, node, attempt, seconds, silent, nothing)
            except (UserInputError, MasterLostError) as error:
                self.result[key] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return key

    def end(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def close(self) -> None:
        for control in self._links:
            control.close()

    def problem(self, key: int) -> UserInputError:
        error = self.result[key]
        assert isinstance(error, UserInputError), error
        return error


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


def test_nodes_that_come_in_any_order_get_their_ranks(meeting: Meeting) -> None:
    for node in (2, 0, 1):
        meeting.join(replace(facts(node), nproc=node + 1))
    meeting.end()
    seats = {met.assignment.node: met.assignment for met in meeting.result.values() if isinstance(met, NodeGroup)}
    assert [(seats[n].first_rank, seats[n].nproc, seats[n].world_size) for n in range(3)] == [
        (0, 1, 6),
        (1, 2, 6),
        (3, 3, 6),
    ]


def test_another_number_of_nodes_is_told_on_both_sides(meeting: Meeting) -> None:
    keys = [meeting.join(facts(0)), meeting.join(facts(1, nnodes=2))]
    meeting.end()
    for key in keys:
        assert "node 1 (host1) was started with 2, the master with 3" in meeting.problem(key).what


def test_two_nodes_with_one_number_are_told_apart_by_name(meeting: Meeting) -> None:
    meeting.join(facts(0))
    meeting.join(facts(1))
    meeting.join(replace(facts(1), host="other"))
    meeting.end()
    assert all("Two nodes were started as node 1" in meeting.problem(key).what for key in range(3))
    assert "other" in meeting.problem(0).what and "host1" in meeting.problem(0).what


def test_versions_and_settings_that_differ_are_named_on_every_node(meeting: Meeting) -> None:
    meeting.join(facts(0, nnodes=2))
    meeting.join(replace(facts(1, nnodes=2), versions={"torch": "2.11"}, settings={"a.b": "2"}))
    meeting.end()
    for key in range(2):
        why = meeting.problem(key).why
        assert "torch is 2.11 on node 1 (host1) and 2.13 on node 0 (host0)" in why
        assert "the configs of node 1 (host1) and node 0 (host0) differ in a.b" in why


def test_a_node_that_does_not_come_is_named(meeting: Meeting) -> None:
    keys = [meeting.join(facts(0), seconds=2), meeting.join(facts(1))]
    meeting.end()
    for key in keys:
        assert meeting.problem(key).what.startswith("Node 2 did not join within")


def test_a_second_start_waits_for_the_masters_next_attempt(meeting: Meeting) -> None:
    control = meeting.connect()
    one = facts(1, nnodes=2)
    meeting.join(facts(0, nnodes=2))
    meeting.join(one, control=control)
    meeting.end()
    again = meeting.join(one, attempt=1, control=control)
    time.sleep(0.5)
    assert again not in meeting.result, "it took the old attempt for the new one"
    meeting.join(facts(0, nnodes=2), attempt=1)
    meeting.end()
    met = meeting.result[again]
    assert isinstance(met, NodeGroup) and met.assignment.attempt == 1


def test_a_node_that_was_started_anew_waits_until_its_old_self_is_given_up(meeting: Meeting) -> None:
    meeting.join(facts(0, nnodes=2))
    meeting.join(facts(1, nnodes=2))
    meeting.end()
    anew = meeting.join(facts(1, nnodes=2))
    meeting.join(facts(0, nnodes=2), attempt=1)
    meeting.end()
    met = meeting.result[anew]
    assert isinstance(met, NodeGroup) and met.assignment.attempt == 1


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
