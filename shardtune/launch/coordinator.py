"""What do all nodes do now? The master hears a report from every node and gives one word; the others follow it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardtune.run.exit_codes import DONE, INTERRUPTED, LEFT_AT_ONCE, PREEMPTED, stop_signal
from shardtune.run.findings import Cause, Finding, at_clock, cause_of

COLLECT_SECONDS = 12.0  # from the first failure until nodes that have not said anything count as lost


@dataclass(frozen=True)
class Report:
    """One node's news. `settled`: it has seen the word to collect, and these are its last findings."""

    node: int
    host: str
    state: Literal["running", "stopping", "done", "failed", "settled"] = "running"
    signal: int = 0
    code: int = DONE
    findings: tuple[Finding, ...] = ()
    count: int = 0  # rises with every report: a node that repeats itself is alive, a key that stands still is not
    time: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        values = json.loads(text)
        return cls(**{**values, "findings": tuple(Finding(**finding) for finding in values["findings"])})


@dataclass(frozen=True)
class Directive:
    """What every node does now: go on, stop (hand the signal on), collect (end the ranks, say what was found), end."""

    state: Literal["go", "stop", "collect", "end"] = "go"
    signal: int = 0
    code: int = DONE
    text: str = ""
    restart: bool = False
    findings: tuple[dict[str, Any], ...] = field(default=())
    time: float = 0.0  # of the last word after a failure, by the master's clock

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Directive:
        values = json.loads(text)
        return cls(**{**values, "findings": tuple(values["findings"])})


class Coordinator:
    """Decides, on the master. Times are the master's own clock (`now`), so that nobody's clock has to be right."""

    def __init__(self, hosts: Sequence[str], node_timeout: float, restarts_left: int, now: float) -> None:
        self.hosts, self.node_timeout, self.restarts_left = hosts, node_timeout, restarts_left
        self._reports: dict[int, Report] = {}
        self._heard = dict.fromkeys(range(len(hosts)), now)
        self._collecting: float | None = None
        self._end: Directive | None = None

    def hear(self, report: Report, now: float) -> None:
        known = self._reports.get(report.node)
        if known is None or known.count != report.count:
            self._heard[report.node] = now
        self._reports[report.node] = report

    def word(self, now: float, wall: float) -> Directive:
        """The word of this moment. Once it is `end` it stays so."""
        if self._end is None:
            self._end = self._decided(now, wall)
        if self._end is not None:
            return self._end
        if self._collecting is not None:
            return Directive("collect")
        asked = [number for report in self._reports.values() if (number := _stop_of(report))]
        return Directive("stop", signal=asked[0]) if asked else Directive()

    def _decided(self, now: float, wall: float) -> Directive | None:
        reports = self._reports.values()
        silent = [node for node, heard in self._heard.items() if now - heard > self.node_timeout]
        if self._collecting is None:
            if len(self._reports) == len(self.hosts) and all(report.state == "done" for report in reports):
                return Directive("end", code=_code([report.code for report in reports]))
            if silent or any(report.state == "failed" for report in reports):
                self._collecting = now
            return None
        waiting = [node for node in self._heard if not self._has_settled(node)]
        if [node for node in waiting if node not in silent] and now - self._collecting <= COLLECT_SECONDS:
            return None
        return self._judge(waiting, now, wall)

    def _has_settled(self, node: int) -> bool:
        return node in self._reports and self._reports[node].state in ("settled", "done")

    def _judge(self, lost: list[int], now: float, wall: float) -> Directive:
        findings = [finding for report in self._reports.values() for finding in report.findings]
        for node in lost:
            ago = now - self._heard[node]
            text = f"Node {node} ({self.hosts[node]}) was last heard of {ago:.0f} s ago."
            findings.append(Finding("lost", wall - ago, node, self.hosts[node], text=text))
        cause = cause_of(findings, len(self.hosts))
        return end_directive(cause, findings, self.restarts_left, wall)


def end_directive(cause: Cause, findings: Sequence[Finding], restarts_left: int, wall: float) -> Directive:
    """The last word, with all findings, the cause first."""
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
    """Times of its findings as the master's clock would have told them (the way here takes less than a second)."""
    offset = seen - report.time
    if abs(offset) < 1.0:
        return report
    return Report(**{**vars(report), "findings": tuple(at_clock(finding, offset) for finding in report.findings)})


def _stop_of(report: Report) -> int:
    """The signal a node stops for, or has stopped for already (its ranks had nothing to save yet); 0 for none."""
    if report.state == "stopping":
        return report.signal
    return int(stop_signal(report.code) or 0) if report.state == "done" else 0


def _code(codes: list[int]) -> int:
    return next((code for code in (LEFT_AT_ONCE, INTERRUPTED, PREEMPTED) if code in codes), max(codes))


Exchange = Callable[[Report], Directive]
