"""What do all nodes do now? The master collects a report from every node and publishes one directive for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardtune.run.exit_codes import DONE, INTERRUPTED, PREEMPTED, TERMINATED, stop_signal
from shardtune.run.findings import Cause, Finding, at_clock, cause_of

COLLECT_SECONDS = 12.0  # from the first failure until nodes that have not reported count as lost


@dataclass(frozen=True)
class Report:
    """One node's state. `collected`: it has seen the directive to collect, and these are its final findings."""

    node: int
    host: str
    state: Literal["running", "stopping", "done", "failed", "collected"] = "running"
    signal: int = 0
    code: int = DONE
    findings: tuple[Finding, ...] = ()
    count: int = 0  # increases with every report: one that no longer changes means that the node is gone
    time: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        values = json.loads(text)
        return cls(**{**values, "findings": tuple(Finding(**finding) for finding in values["findings"])})


@dataclass(frozen=True)
class Directive:
    """What every node does now: go on, stop (forward the signal), collect (end the ranks, report findings), end."""

    state: Literal["go", "stop", "collect", "end"] = "go"
    signal: int = 0
    code: int = DONE
    text: str = ""
    restart: bool = False
    findings: tuple[dict[str, Any], ...] = field(default=())
    time: float = 0.0  # of the final directive after a failure, by the master's clock

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Directive:
        values = json.loads(text)
        return cls(**{**values, "findings": tuple(values["findings"])})


class Coordinator:
    """Decides, on the master. Times are the master's own clock (`now`), so the nodes' clocks need not agree."""

    def __init__(self, hosts: Sequence[str], node_timeout: float, restarts_left: int, now: float) -> None:
        self.hosts, self.node_timeout, self.restarts_left = hosts, node_timeout, restarts_left
        self._reports: dict[int, Report] = {}
        self._last_seen = dict.fromkeys(range(len(hosts)), now)
        self._collecting: float | None = None
        self._end: Directive | None = None

    def receive(self, report: Report, now: float) -> None:
        known = self._reports.get(report.node)
        if known is None or known.count != report.count:
            self._last_seen[report.node] = now
        self._reports[report.node] = report

    def directive(self, now: float, wall: float) -> Directive:
        """The directive at this moment. `end` is final."""
        if self._end is None:
            self._end = self._decide(now, wall)
        if self._end is not None:
            return self._end
        if self._collecting is not None:
            return Directive("collect")
        asked = [number for report in self._reports.values() if (number := _stop_of(report))]
        return Directive("stop", signal=asked[0]) if asked else Directive()

    def _decide(self, now: float, wall: float) -> Directive | None:
        reports = self._reports.values()
        silent = [node for node, seen_at in self._last_seen.items() if now - seen_at > self.node_timeout]
        if self._collecting is None:
            if len(self._reports) == len(self.hosts) and all(report.state == "done" for report in reports):
                return Directive("end", code=_code([report.code for report in reports]))
            if silent or any(report.state == "failed" for report in reports):
                self._collecting = now
            return None
        waiting = [node for node in self._last_seen if not self._has_collected(node)]
        if [node for node in waiting if node not in silent] and now - self._collecting <= COLLECT_SECONDS:
            return None
        return self._conclude(waiting, now, wall)

    def _has_collected(self, node: int) -> bool:
        return node in self._reports and self._reports[node].state in ("collected", "done")

    def _conclude(self, lost: list[int], now: float, wall: float) -> Directive:
        findings = [finding for report in self._reports.values() for finding in report.findings]
        for node in lost:
            ago = now - self._last_seen[node]
            text = f"Node {node} ({self.hosts[node]}) stopped responding {ago:.0f} s ago."
            findings.append(Finding("lost", wall - ago, node, self.hosts[node], text=text))
        cause = cause_of(findings, len(self.hosts))
        return end_directive(cause, findings, self.restarts_left, wall)


def end_directive(cause: Cause, findings: Sequence[Finding], restarts_left: int, wall: float) -> Directive:
    """The final directive, with all findings, the cause first."""
    first = [cause.finding] if cause.finding is not None else []
    return Directive(
        "end",
        code=cause.code,
        text=cause.text,
        restart=cause.restartable and restarts_left > 0,
        findings=tuple(
            finding.as_dict() for finding in (*first, *(other for other in findings if other is not cause.finding))
        ),
        time=wall,
    )


def on_masters_clock(report: Report, seen: float) -> Report:
    """The report with its findings' times on the master's clock (it took less than a second to get here)."""
    offset = seen - report.time
    if abs(offset) < 1.0:
        return report
    return Report(**{**vars(report), "findings": tuple(at_clock(finding, offset) for finding in report.findings)})


def _stop_of(report: Report) -> int:
    """The signal a node is stopping for, or has stopped for before its first step; 0 for none."""
    if report.state == "stopping":
        return report.signal
    return int(stop_signal(report.code) or 0) if report.state == "done" else 0


def _code(codes: list[int]) -> int:
    return next((code for code in (TERMINATED, INTERRUPTED, PREEMPTED) if code in codes), max(codes))


Exchange = Callable[[Report], Directive]
