"""What did a check of the job find? A rule, how bad it is, where it is, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "notice"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "notice")


@dataclass(frozen=True)
class Rule:
    """For docs/cluster-lint.md.

    Attributes:
        severity: The worst it reports.
        reports: What it looks for.
        why: What happens otherwise.
    """

    name: str
    severity: Severity
    reports: str
    why: str


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        severity: error: the job will be refused, break, or lose its result; warning: it may, or is slower than it could
            be; notice: a setting with no effect, or something that was not checked.
        path: A setting (`cluster.memory`), or a place in the rendered objects (`spec.template.spec.containers[0]`).
        fix: What to write instead.
    """

    rule: str
    severity: Severity
    path: str
    what: str
    fix: str


def error(rule: str, path: str, what: str, fix: str) -> Finding:
    return Finding(rule, "error", path, what, fix)


def warning(rule: str, path: str, what: str, fix: str) -> Finding:
    return Finding(rule, "warning", path, what, fix)


def notice(rule: str, path: str, what: str, fix: str) -> Finding:
    return Finding(rule, "notice", path, what, fix)
