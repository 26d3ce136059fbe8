"""Which rank failed first, and why? One cause from the findings of all nodes; the rest are its consequences."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardtune.run.error_codes import CODES_OF_KINDS
from shardtune.run.exit_codes import FAILED, LOST, NO_PROGRESS
from shardtune.run.failure import three_parts

# Which kind is the cause, in this order; within a line, the earliest. A rank that was killed or stopped, or
# raised its own exception, explains those that waited for it; never the other way round.
_CAUSES = (
    ("user_error", "known_error", "machine_error", "error", "killed", "stopped", "exited"),
    ("stalled", "silent"),
    ("lost",),
    ("finished",),
    ("waiting",),
    ("peer_lost",),
)
_FINAL = ("user_error", "known_error")  # a restart would end the same way


@dataclass(frozen=True)
class Finding:
    """What a launcher knows about the failure of one rank, or (rank None) of a whole node.

    `kind`: user_error, known_error, machine_error, error, peer_lost (see failure.kind_of); killed (by a signal) and
    exited (with a code and no record); stopped (by SIGSTOP or a debugger), silent (its process does not even run its
    watchdog), stalled (its deadline passed during its own work), waiting (… while it waited for other ranks), lost (a
    node), finished (a script's rank that had ended with 0 when others failed).
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
    for_memory: bool | None = None  # killed: whether the cgroup counts it as an OOM kill; None: nobody counts
    error_code: str = ""  # as the rank's own error has it; what `explained_by` adds is in the file

    @property
    def explained_by(self) -> str:
        """The code that `shardtune explain` knows it by; "" if it knows none."""
        return self.error_code or CODES_OF_KINDS.get(self.kind, "")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error_code": self.explained_by}


@dataclass(frozen=True)
class Cause:
    """The message to print, the exit code, and whether a restart can help."""

    text: str
    code: int
    restartable: bool
    finding: Finding | None


def cause_of(findings: Sequence[Finding], nnodes: int) -> Cause:
    """The root cause among `findings`, with a message that a person can act on."""
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
    if first.kind in (*_FINAL, "machine_error"):
        return first.text
    if first.kind == "error":
        alone = all(other.text == first.text for other in others) and nnodes == 1
        return (
            first.text
            if alone and not others and not first.rank
            else f"{who} failed first{doing}:\n{first.text.rstrip()}"
        )
    if first.kind == "killed":
        return _killed(who, first, doing)
    if first.kind == "exited":
        log = f"Its output: {first.text}" if first.text else ""
        return three_parts(f"{who} ended with exit code {first.exit_code} and no error message{doing}.", fix=log)
    if first.kind == "lost":
        return three_parts(
            f"{first.text}",
            why="Its machine, network or launcher is down, or the scheduler has preempted it.",
            fix="Check that machine. parallel.node_timeout_seconds sets how long a node may be unresponsive.",
            code=first.explained_by,
        )
    if first.kind == "finished":
        waited = [one for one in others if one.kind in ("waiting", "peer_lost")]
        last = f": {waited[0].text.strip().splitlines()[-1]}" if waited and waited[0].text.strip() else ""
        return three_parts(
            f"{who} had ended with exit code 0 while other ranks waited for it.",
            why=f"{_who(waited[0], nnodes)} noticed first{last}" if waited else "",
            fix="Let every rank take part in the same number of steps; usually their numbers of batches differ (a "
            "DistributedSampler, drop_last=True, or DDP's join()).",
        )
    if first.kind == "peer_lost":
        return three_parts(
            f"The connection between the ranks broke{doing}, and no rank reported why.",
            why=f"{who} noticed first: {first.text.strip().splitlines()[-1]}",
            fix="Check the network between the nodes (docs/failures.md).",
            code=first.explained_by,
        )
    return _hung(who, first, others, doing)


# Why and fix of a SIGKILL, by whether the cgroup counts it as an OOM kill.
_KILLED = {
    True: (
        "The host ran out of memory: the kernel's OOM killer killed it (according to the cgroup's counter).",
        "Give the job more memory, or use fewer data workers or processes.",
    ),
    False: (
        "The cgroup recorded no OOM kill: a user or the scheduler probably sent the signal.",
        "Check the scheduler's log, and dmesg or journalctl of the machine, for who killed it.",
    ),
    None: (
        "Either the kernel's OOM killer, or an operator or scheduler.",
        "Look for 'Out of memory' in dmesg: if it names this process, give the job more memory, or use fewer data "
        "workers or processes; if not, check the scheduler's log.",
    ),
}


def _killed(who: str, finding: Finding, doing: str) -> str:
    number = finding.exit_code - 128
    why = fix = ""
    if number == signal.SIGKILL:
        why, fix = _KILLED[finding.for_memory]
    what = f"{who} was killed by signal {number} ({signal.Signals(number).name}){doing}."
    return three_parts(what, why, fix, finding.explained_by)


def _hung(who: str, first: Finding, others: Sequence[Finding], doing: str) -> str:
    waited = _ranks(others, ("waiting", "peer_lost"))
    stalled = _ranks(others, ("stalled",))
    what = {
        "stopped": f"{who} was stopped (SIGSTOP or a debugger){doing}.",
        "silent": f"{who} hung{doing}: its process does not respond at all.",
        "stalled": f"{who} hung{doing}.",
        "waiting": f"No rank made progress{doing}: all are waiting for each other.",
    }[first.kind]
    why = first.text
    if waited and first.kind != "waiting":
        why += f" {waited} waited for it."
    if stalled and first.kind != "waiting":
        why += f" {stalled} made no progress either."
    fix = f"Its stack: {first.stack}" if first.stack else ""
    return three_parts(what, why.strip(), fix, first.explained_by)


def _ranks(findings: Sequence[Finding], kinds: tuple[str, ...]) -> str:
    """`Rank 1`, `Ranks 1, 2`, or nothing."""
    ranks = sorted(finding.rank for finding in findings if finding.rank is not None and finding.kind in kinds)
    return f"{'Ranks' if len(ranks) > 1 else 'Rank'} {', '.join(map(str, ranks))}" if ranks else ""


def _who(finding: Finding, nnodes: int) -> str:
    place = f"node {finding.node}, {finding.host}" if nnodes > 1 else ""
    if finding.rank is None:
        return f"Node {finding.node} ({finding.host})"
    return f"Rank {finding.rank}" + (f" ({place})" if place else "")


def at_clock(finding: Finding, offset: float) -> Finding:
    """The same, with its time on the master's clock."""
    return replace(finding, time=finding.time + offset)
