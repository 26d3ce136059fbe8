"""What did a check find? A verdict, the evidence it rests on, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail"]
_ORDER: tuple[Verdict, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One check's answer.

    Attributes:
        check: Its name, the same on every machine: `memlock`, `gpu.ecc`.
        verdict: ok (also where there is nothing to check); warn: slower, or at risk; fail: the run will break.
        evidence: What was seen, with its numbers.
        fix: What to change; empty where nothing has to be.
    """

    check: str
    verdict: Verdict
    evidence: str
    fix: str = ""


@dataclass(frozen=True)
class NodeReport:
    """One node's part. `facts` are what nodes are compared by; `clock` its time when it was sent."""

    node: int
    host: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    clock: float = 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NodeReport:
        return cls(**{**values, "findings": tuple(Finding(**one) for one in values["findings"])})


def ok(check: str, evidence: str) -> Finding:
    return Finding(check, "ok", evidence)


def warn(check: str, evidence: str, fix: str) -> Finding:
    return Finding(check, "warn", evidence, fix)


def fail(check: str, evidence: str, fix: str) -> Finding:
    return Finding(check, "fail", evidence, fix)


def worst(findings: Iterable[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), key=_ORDER.index, default="ok")
