"""What does `shardtune doctor` print? A line for each check, and what to change where it is not ok."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardtune.doctor.finding import Finding
from shardtune.doctor.nodes import Examination
from shardtune.terminal import count, say, size

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show(console: Console, examination: Examination) -> None:
    """One node: all its findings. Several, on node 0: a table of nodes, what is not ok by node, what concerns all."""
    reports = examination.reports
    if len(reports) == 1:
        _show_findings(console, reports[0].findings)
    else:
        console.print(_nodes_table(examination))
        for report in reports:
            prefix = f"node {report.node} ({report.host}): "
            _show_findings(console, [one for one in report.findings if one.verdict != "ok"], prefix)
    _show_findings(console, examination.findings)
    if examination.links is not None:
        console.print(_links_table(examination.links["links"]))
    every = [*(one for report in reports for one in report.findings), *examination.findings]
    numbers = {verdict: sum(one.verdict == verdict for one in every) for verdict in ("fail", "warn")}
    text = f"{count(numbers['fail'], 'failed check')}, {count(numbers['warn'], 'warning')}"
    elsewhere = examination.verdict == "fail" and not numbers["fail"]
    text = f"{text} here; a check failed elsewhere (see node 0)" if elsewhere else text
    say(console, "verdict", "ready" if examination.verdict == "ok" else text, _STYLES[examination.verdict])


def as_json(examination: Examination) -> dict[str, Any]:
    """`docs/doctor.md` describes it."""
    return {
        "verdict": examination.verdict,
        "nodes": [
            {"node": one.node, "host": one.host, "findings": list(map(vars, one.findings)), "facts": dict(one.facts)}
            for one in examination.reports
        ],
        "findings": list(map(vars, examination.findings)),
        "links": examination.links,
    }


def _show_findings(console: Console, findings: Sequence[Finding], prefix: str = "") -> None:
    for finding in findings:
        say(console, finding.verdict, f"{prefix}{finding.check}: {finding.evidence}", _STYLES[finding.verdict])
        if finding.fix:
            say(console, "", f"→ {finding.fix}")


def _nodes_table(examination: Examination) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("node", "host", "ok", "warn", "fail", "GPUs", "driver", "torch"):
        table.add_column(heading, justify="left" if heading in ("host", "GPUs") else "right")
    for report in examination.reports:
        verdicts = [one.verdict for one in report.findings]
        numbers = [str(sum(verdict == one for one in verdicts)) for verdict in _STYLES]
        facts = [report.facts.get(name, "") for name in ("GPUs", "driver", "package torch")]
        table.add_row(str(report.node), escape(report.host), *numbers, *map(escape, facts))
    return table


def _links_table(links: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("bus bandwidth", "ranks", "all-reduce", "all-gather"):
        table.add_column(heading, justify="left" if heading == "bus bandwidth" else "right")
    for link in links:
        speeds = (f"{size(link[name])}/s" for name in ("all_reduce", "all_gather"))
        table.add_row(escape(link["link"]), str(link["ranks"]), *speeds)
    return table
