"""Who failed first, and why? From everything the nodes found, one cause; the rest are its consequences."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardtune.run.exit_codes import FAILED, LOST, NO_PROGRESS
from shardtune.run.failure import three_parts

# In this order a kind is believed to be the cause; within a line the earliest is. A rank that was killed or stopped, or
# threw something of its own, explains those that waited for it; never the other way round.
_CAUSES = (
    ("user_error", "known_error", "error", "killed", "stopped", "exited"),
    ("stalled", "silent"),
    ("lost",),
    ("waiting",),
    ("peer_lost",),
)
_FINAL = ("user_error", "known_error")  # another start would end the same way


@dataclass(frozen=True)
class Finding:
    """What a launcher found out about one rank, or (rank None) about a whole node.

    `kind`: mistake, answer, error, echo (see failure.kind_of); killed (by a signal) and exited (a code without a word);
    stopped (by SIGSTOP or a debugger), silent (its process does not even run its own watchdog), stalled (its deadline
    passed while it was doing something of its own), waiting (… while it waited for other ranks), lost (a node).
    """

    kind: str
    time: float
    node: int
    host: str
    rank: int | None = None
    text: str = ""
    exit_code: int = FAILED
    doing: str = ""
    stack: str = ""
    for_memory: bool | None = None  # killed: whether the cgroup counts it as a kill for memory; None: nobody counts

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cause:
    """The one thing that is told, the exit code it gives, and whether starting again can help."""

    text: str
    code: int
    restartable: bool
    finding: Finding | None


def cause_of(findings: Sequence[Finding], nnodes: int) -> Cause:
    """The first genuine failure among `findings`, told so that a person can act on it."""
    for kinds in _CAUSES:
        found = [finding for finding in findings if finding.kind in kinds]
        if found:
            first = min(found, key=lambda finding: (finding.time, -1 if finding.rank is None else finding.rank))
            others = [finding for finding in findings if finding is not first]
            return Cause(_describe(first, others, nnodes), _code(first), first.kind not in _FINAL, first)
    return Cause("error: A worker ended without an error message.", FAILED, True, None)


def _code(finding: Finding) -> int:
    if finding.kind in ("stopped", "silent", "stalled", "waiting"):
        return NO_PROGRESS
    return LOST if finding.kind in ("lost", "peer_lost") else finding.exit_code


def _describe(first: Finding, others: Sequence[Finding], nnodes: int) -> str:
    who = _who(first, nnodes)
    doing = f" while {first.doing}" if first.doing else ""
    if first.kind in ("user_error", "known_error"):
        return first.text
    if first.kind == "error":
        alone = all(other.text == first.text for other in others) and nnodes == 1
        return first.text if alone and not others else f"{who} failed first{doing}:\n{first.text.rstrip()}"
    if first.kind == "killed":
        return _killed(who, first, doing)
    if first.kind == "exited":
        return three_parts(f"{who} ended with exit code {first.exit_code} and no error message{doing}.")
    if first.kind == "lost":
        return three_parts(
            f"{first.text}",
            why="Its machine, its network or its launcher is gone, or the scheduler has taken it away.",
            fix="Look at that machine. parallel.node_timeout_seconds is how long a node may be silent.",
        )
    if first.kind == "peer_lost":
        return three_parts(
            f"The connection between the ranks broke, and no rank said why{doing}.",
            why=f"{who} noticed first: {first.text.strip().splitlines()[-1]}",
            fix="Look at the network between the nodes (docs/failures.md).",
        )
    return _hung(who, first, others, doing)


# By what the cgroup says of a SIGKILL: why, and what to do.
_KILLED = {
    True: (
        "The host's memory ran out: the kernel's out-of-memory killer ended it (the cgroup counts it).",
        "Give the job more memory, or use fewer data workers or processes.",
    ),
    False: (
        "The cgroup counts no kill for memory, so an operator or a scheduler has sent it.",
        "Look in the log of the scheduler, and in dmesg or journalctl of the machine, for who ended it.",
    ),
    None: (
        "Linux does that when memory runs out; so does an operator or a scheduler.",
        "Look for 'Out of memory' in dmesg: if it names this process, give the job more memory, or use fewer data "
        "workers or processes; if not, look in the scheduler's log.",
    ),
}


def _killed(who: str, finding: Finding, doing: str) -> str:
    number = finding.exit_code - 128
    why = fix = ""
    if number == signal.SIGKILL:
        why, fix = _KILLED[finding.for_memory]
    return three_parts(f"{who} was killed by signal {number} ({signal.Signals(number).name}){doing}.", why, fix)


def _hung(who: str, first: Finding, others: Sequence[Finding], doing: str) -> str:
    waiting_ranks = sorted(
        other.rank for other in others if other.rank is not None and other.kind in ("waiting", "peer_lost", "stalled")
    )
    what = {
        "stopped": f"{who} was stopped (SIGSTOP or a debugger){doing}.",
        "silent": f"{who} hung{doing}: its process does not react at all.",
        "stalled": f"{who} hung{doing}.",
        "waiting": f"No rank came further{doing}: all wait for each other.",
    }[first.kind]
    why = first.text
    if waiting_ranks and first.kind != "waiting":
        why += f" {'Ranks' if len(waiting_ranks) > 1 else 'Rank'} {', '.join(map(str, waiting_ranks))} waited for it."
    fix = f"Its stack: {first.stack}" if first.stack else ""
    return three_parts(what, why.strip(), fix)


def _who(finding: Finding, nnodes: int) -> str:
    place = f"node {finding.node}, {finding.host}" if nnodes > 1 else ""
    if finding.rank is None:
        return f"Node {finding.node} ({finding.host})"
    return f"Rank {finding.rank}" + (f" ({place})" if place else "")


def at_clock(finding: Finding, offset: float) -> Finding:
    """The same, with its time on the master's clock."""
    return replace(finding, time=finding.time + offset)
