"""Are all nodes there, and do they mean the same run? Every node states its facts; the master compares them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shardtune.errors import UserInputError
from shardtune.launch.link import KeyValue, Link
from shardtune.launch.place import Node
from shardtune.launch.workers import RankAssignment
from shardtune.run.node_facts import Facts, differences, digests, versions

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig

T = TypeVar("T")
_TALK = 30.0  # seconds for one exchange with the master while nodes meet
_POLL = 0.1


def facts_of(node: Node, nproc: int, config: RunConfig) -> Facts:
    return Facts(node.node_rank, node.nnodes, nproc, versions=versions(), settings=digests(config))


@dataclass(frozen=True)
class Met:
    """All nodes are there. `hosts` by node."""

    assignment: RankAssignment
    hosts: tuple[str, ...]


def meet(
    link: Link,
    facts: Facts,
    node: Node,
    attempt: int,
    seconds: float,
    say: Callable[[str], None],
    idle: Callable[[], None],
) -> Met:
    """Wait until all nodes are there for this attempt (the master's number; the others take its, if it is no older).

    Args:
        idle: Called while waiting; may raise (a signal came).

    Raises:
        UserInputError: a node is missing, or one has other facts; the same text on every node.
    """
    waiting = _Waiting(link, seconds, idle)
    if facts.node == 0:
        verdict = _gather(waiting, facts, attempt, say)
    else:
        attempt, verdict = _attend(waiting, facts, attempt, say)
    if verdict["problem"]:
        raise UserInputError(*verdict["problem"][:1], why=verdict["problem"][1], fix=verdict["problem"][2])
    counts, hosts = verdict["nproc"], verdict["hosts"]
    assignment = RankAssignment(
        attempt=attempt, node=facts.node, nnodes=facts.nnodes, first_rank=sum(counts[: facts.node]), nproc=facts.nproc,
        world_size=sum(counts), master_addr=node.master_addr, master_port=link.port,
        store_port=link.store_port, host=facts.host,
    )  # fmt: skip
    return Met(assignment, tuple(hosts))


class _Waiting:
    """Asks the master's table again and again until the time is over."""

    def __init__(self, link: Link, seconds: float, idle: Callable[[], None]) -> None:
        self.link, self.idle = link, idle
        self.seconds, self.began = seconds, time.monotonic()

    def call(self, action: Callable[[KeyValue], T]) -> T:
        return self.link.call(action, _TALK, self.idle)

    def read(self, key: str) -> Any:
        """The JSON value of a key, or None while it is not there."""
        text = self.call(lambda table: table.get(key))
        return None if text is None else json.loads(text)

    def write(self, key: str, value: object) -> None:
        self.call(lambda table: table.set(key, json.dumps(value)))

    def take_seat(self, attempt: int, facts: Facts) -> Facts:
        """Whoever holds this node's assignment: we, unless another came before."""
        mine = json.dumps(asdict(facts))
        return Facts(**json.loads(self.call(lambda table: table.add(f"member/{attempt}/{facts.node}", mine))))

    def pause(self) -> bool:
        """False when the time is over."""
        self.idle()
        time.sleep(_POLL)
        return time.monotonic() - self.began < self.seconds

    @property
    def waited(self) -> float:
        return time.monotonic() - self.began


def _gather(waiting: _Waiting, facts: Facts, attempt: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The master's part: hear every node, compare, and publish what comes of it."""
    waiting.write("nnodes", facts.nnodes)
    waiting.write("attempt", attempt)
    there: dict[int, Facts] = {0: facts}
    complaint, told, more = None, 0.0, True
    while len(there) < facts.nnodes and complaint is None and more:
        more = waiting.pause()
        complaint = waiting.read(f"complaint/{attempt}")
        for node in set(range(1, facts.nnodes)) - set(there):
            if (said := waiting.read(f"member/{attempt}/{node}")) is not None:
                there[node] = Facts(**said)
        if waiting.waited - told >= (5 if told == 0 else 30) and len(there) < facts.nnodes:
            told = waiting.waited
            say(f"waiting for {_named(facts.nnodes, there)} since {told:.0f} s ({len(there)} of {facts.nnodes} here)")
    verdict = _verdict(facts, there, complaint, waiting.waited)
    waiting.write(f"met/{attempt}", verdict)
    return verdict


def _verdict(facts: Facts, there: dict[int, Facts], complaint: Any, waited: float) -> dict[str, Any]:
    problem = complaint
    if problem is None and len(there) < facts.nnodes:
        problem = [
            f"{_named(facts.nnodes, there).capitalize()} did not come within {waited:.0f} s.",
            f"{len(there)} of {facts.nnodes} nodes are here: {', '.join(f.host for f in there.values())}.",
            "Start the same command there with its own --node-rank, or lower --nnodes on all nodes. "
            "parallel.join_timeout_minutes is how long a node waits.",
        ]
    ordered = [there[node] for node in sorted(there)]
    if problem is None and (lines := differences(ordered)):
        problem = [
            "The nodes do not run the same thing.",
            "; ".join(lines) + ".",
            "Use one image and one config file on all nodes.",
        ]
    return {"problem": problem, "nproc": [f.nproc for f in ordered], "hosts": [f.host for f in ordered]}


def _attend(waiting: _Waiting, facts: Facts, at_least: int, say: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """The part of every other node: take the assignment, and wait for the master's verdict."""
    told = -1
    while True:
        attempt = waiting.read("attempt")
        if attempt is not None and attempt >= at_least:
            _check_nnodes(waiting, facts, attempt)
            holder = waiting.take_seat(attempt, facts)
            verdict = waiting.read(f"met/{attempt}")
            if holder.incarnation == facts.incarnation and verdict is not None:
                return attempt, verdict
            if holder.incarnation != facts.incarnation:
                if verdict is None or _is_alive(waiting, attempt, facts.node):
                    _complain(waiting, attempt, facts, holder)
                if told != attempt:
                    say(
                        f"node {facts.node} was started anew; waiting for the others to notice that the old one is gone"
                    )
                    told = attempt
        if not waiting.pause():
            raise UserInputError(
                f"Not all nodes came together within {waiting.waited:.0f} s.",
                why="The master is there, but its verdict on this start is not.",
                fix="Look at the master's own message.",
            )


def _check_nnodes(waiting: _Waiting, facts: Facts, attempt: int) -> None:
    expected = waiting.read("nnodes")
    if expected != facts.nnodes:
        problem = [
            f"The nodes do not agree on their number: node {facts.node} ({facts.host}) was started with --nnodes "
            f"{facts.nnodes}, the master with {expected}.",
            "Each would wait for a different number of ranks.",
            "Start all nodes with the same --nnodes.",
        ]
        waiting.write(f"complaint/{attempt}", problem)
        raise UserInputError(problem[0], why=problem[1], fix=problem[2])


def _complain(waiting: _Waiting, attempt: int, facts: Facts, holder: Facts) -> None:
    problem = [
        f"Two nodes were started as node {facts.node}: {holder.host} and {facts.host}.",
        "Every node needs a --node-rank of its own.",
        f"Give the nodes the numbers 0 to {facts.nnodes - 1}, each once.",
    ]
    waiting.write(f"complaint/{attempt}", problem)
    raise UserInputError(problem[0], why=problem[1], fix=problem[2])


def _is_alive(waiting: _Waiting, attempt: int, node: int) -> bool:
    """Does the holder of the assignment still report?"""
    key = f"report/{attempt}/{node}"
    before = waiting.read(key)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        waiting.pause()
        if waiting.read(key) != before:
            return True
    return False


def _named(nnodes: int, there: dict[int, Facts]) -> str:
    missing = [str(node) for node in range(nnodes) if node not in there]
    return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
