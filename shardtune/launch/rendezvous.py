"""Have all nodes joined, and is it the same run on each? Every node publishes its facts; the master compares them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shardtune.errors import UserInputError
from shardtune.launch.control_connection import ControlConnection, KeyValue
from shardtune.launch.process_role import Node
from shardtune.launch.workers import RankAssignment
from shardtune.run.node_facts import NodeFacts, differences, digests, versions

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig

T = TypeVar("T")
_CALL_SECONDS = 30.0  # for one exchange with the master
_POLL_SECONDS = 0.1


def facts_of(node: Node, nproc: int, config: RunConfig, more: Mapping[str, str] | None = None) -> NodeFacts:
    """Args:
    more: Digests of what else all nodes must have in common, by name.
    """
    settings = {**digests(config), **(more or {})}
    return NodeFacts(node.node_rank, node.nnodes, nproc, versions=versions(), settings=settings)


@dataclass(frozen=True)
class NodeGroup:
    """All nodes have joined. `hosts` by node rank."""

    assignment: RankAssignment
    hosts: tuple[str, ...]


def rendezvous(
    control: ControlConnection,
    facts: NodeFacts,
    node: Node,
    attempt: int,
    seconds: float,
    log: Callable[[str], None],
    idle: Callable[[], None],
) -> NodeGroup:
    """Wait until all nodes have joined this attempt. The master sets its number; other nodes use that, unless it is
    older than theirs.

    Args:
        idle: Called while waiting; may raise (a signal came).

    Raises:
        UserInputError: a node is missing, or one has other facts; the same text on every node.
    """
    table = TablePoller(control, seconds, idle)
    if facts.node == 0:
        verdict = _gather_nodes(table, facts, attempt, log)
    else:
        attempt, verdict = _join(table, facts, attempt, log)
    if verdict["problem"]:
        raise _refusal(verdict["problem"])
    counts, hosts = verdict["nproc"], verdict["hosts"]
    assignment = RankAssignment(
        attempt=attempt, node=facts.node, nnodes=facts.nnodes, first_rank=sum(counts[: facts.node]), nproc=facts.nproc,
        world_size=sum(counts), master_addr=node.master_addr, master_port=control.port,
        store_port=control.store_port, host=facts.host,
    )  # fmt: skip
    return NodeGroup(assignment, tuple(hosts))


class TablePoller:
    """Polls the master's table until the timeout."""

    def __init__(self, control: ControlConnection, seconds: float, idle: Callable[[], None]) -> None:
        self.control, self.idle = control, idle
        self.seconds, self.began = seconds, time.monotonic()

    def call(self, action: Callable[[KeyValue], T]) -> T:
        return self.control.call(action, _CALL_SECONDS, self.idle)

    def read(self, key: str) -> Any:
        """The JSON value of a key, or None while it is not set."""
        text = self.call(lambda table: table.get(key))
        return None if text is None else json.loads(text)

    def write(self, key: str, value: object) -> None:
        self.call(lambda table: table.set(key, json.dumps(value)))

    def claim_node_rank(self, attempt: int, facts: NodeFacts) -> NodeFacts:
        """The facts of whoever holds this node rank: our own, unless another process claimed it first."""
        mine = json.dumps(asdict(facts))
        return NodeFacts(**json.loads(self.call(lambda table: table.add(f"member/{attempt}/{facts.node}", mine))))

    def pause(self) -> bool:
        """False after the timeout."""
        self.idle()
        time.sleep(_POLL_SECONDS)
        return time.monotonic() - self.began < self.seconds

    @property
    def waited(self) -> float:
        return time.monotonic() - self.began


def _gather_nodes(table: TablePoller, facts: NodeFacts, attempt: int, log: Callable[[str], None]) -> dict[str, Any]:
    """On the master: wait for every node, compare them, and publish the verdict."""
    table.write("nnodes", facts.nnodes)
    table.write("attempt", attempt)
    joined: dict[int, NodeFacts] = {0: facts}
    conflict, reported, more = None, 0.0, True
    while len(joined) < facts.nnodes and conflict is None and more:
        more = table.pause()
        conflict = table.read(f"conflict/{attempt}")
        for node in set(range(1, facts.nnodes)) - set(joined):
            if (node_facts := table.read(f"member/{attempt}/{node}")) is not None:
                joined[node] = NodeFacts(**node_facts)
        if table.waited - reported >= (5 if reported == 0 else 30) and len(joined) < facts.nnodes:
            reported = table.waited
            missing = _missing_nodes(facts.nnodes, joined)
            log(f"waiting for {missing} since {reported:.0f} s ({len(joined)} of {facts.nnodes} nodes have joined)")
    verdict = _verdict(facts, joined, conflict, table.waited)
    table.write(f"verdict/{attempt}", verdict)
    return verdict


def _verdict(facts: NodeFacts, joined: dict[int, NodeFacts], conflict: Any, waited: float) -> dict[str, Any]:
    problem = conflict
    if problem is None and len(joined) < facts.nnodes:
        problem = [
            f"{_missing_nodes(facts.nnodes, joined).capitalize()} did not join within {waited:.0f} s.",
            f"{len(joined)} of {facts.nnodes} nodes joined: {', '.join(f.host for f in joined.values())}.",
            "Start the same command there with its own --node-rank, or lower --nnodes on all nodes. "
            "parallel.join_timeout_minutes sets how long a node waits.",
            "node-missing",
        ]
    ordered = [joined[node] for node in sorted(joined)]
    if problem is None and (lines := differences(ordered)):
        problem = [
            "The nodes do not have the same packages and settings.",
            "; ".join(lines) + ".",
            "Use one image, one config file and one command on all nodes.",
            "nodes-differ",
        ]
    return {"problem": problem, "nproc": [f.nproc for f in ordered], "hosts": [f.host for f in ordered]}


def _refusal(problem: list[str]) -> UserInputError:
    """From what, why, fix and code, as they are on the table."""
    what, why, fix, code = problem
    return UserInputError(what, why=why, fix=fix, code=code)


def _join(
    table: TablePoller, facts: NodeFacts, at_least: int, log: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    """On every other node: claim the node rank, and wait for the master's verdict."""
    reported = -1
    while True:
        attempt = table.read("attempt")
        if attempt is not None and attempt >= at_least:
            _check_nnodes(table, facts, attempt)
            holder = table.claim_node_rank(attempt, facts)
            verdict = table.read(f"verdict/{attempt}")
            if holder.incarnation == facts.incarnation and verdict is not None:
                return attempt, verdict
            if holder.incarnation != facts.incarnation:
                if verdict is None or _is_alive(table, attempt, facts.node):
                    _report_duplicate_rank(table, attempt, facts, holder)
                if reported != attempt:
                    log(f"node {facts.node} was restarted; waiting for the master to notice that the old one is gone")
                    reported = attempt
        if not table.pause():
            raise UserInputError(
                f"Not all nodes joined within {table.waited:.0f} s.",
                why="The master answers, but has not started this attempt.",
                fix="See the error message on node 0.",
                code="node-missing",
            )


def _check_nnodes(table: TablePoller, facts: NodeFacts, attempt: int) -> None:
    expected = table.read("nnodes")
    if expected != facts.nnodes:
        problem = [
            f"The nodes disagree about --nnodes: node {facts.node} ({facts.host}) was started with "
            f"{facts.nnodes}, the master with {expected}.",
            "They would wait for different numbers of ranks.",
            "Start all nodes with the same --nnodes.",
            "nodes-differ",
        ]
        table.write(f"conflict/{attempt}", problem)
        raise _refusal(problem)


def _report_duplicate_rank(table: TablePoller, attempt: int, facts: NodeFacts, holder: NodeFacts) -> None:
    problem = [
        f"Two nodes were started as node {facts.node}: {holder.host} and {facts.host}.",
        "Every node needs its own --node-rank.",
        f"Number the nodes from 0 to {facts.nnodes - 1}.",
        "nodes-differ",
    ]
    table.write(f"conflict/{attempt}", problem)
    raise _refusal(problem)


def _is_alive(table: TablePoller, attempt: int, node: int) -> bool:
    """Does the holder of the node rank still send reports?"""
    key = f"report/{attempt}/{node}"
    before = table.read(key)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        table.pause()
        if table.read(key) != before:
            return True
    return False


def _missing_nodes(nnodes: int, joined: dict[int, NodeFacts]) -> str:
    missing = [str(node) for node in range(nnodes) if node not in joined]
    return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
