"""What does `shardtune doctor` print? A line for each check, and what to change where it is not ok."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from shardtune.doctor.finding import Finding, worst
from shardtune.terminal import count, say

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show_findings(console: Console, findings: Sequence[Finding], prefix: str = "") -> None:
    for finding in findings:
        say(console, finding.verdict, f"{prefix}{finding.check}: {finding.evidence}", _STYLES[finding.verdict])
        if finding.fix:
            say(console, "", f"→ {finding.fix}")


def show_verdict(console: Console, findings: Sequence[Finding]) -> None:
    numbers = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in ("fail", "warn")}
    verdict = worst(findings)
    text = (
        "ready" if verdict == "ok" else f"{count(numbers['fail'], 'failed check')}, {count(numbers['warn'], 'warning')}"
    )
    say(console, "verdict", text, _STYLES[verdict])


def as_json(findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    return {"verdict": worst(findings), "findings": [vars(finding) for finding in findings], **more}
