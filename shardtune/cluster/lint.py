"""Is the job right, before it leaves this machine? Settings, rendered pods and plan against what clusters do with them.

An API server accepts most of what is reported here; docs/cluster-lint.md has every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from shardtune.cluster import (
    lint_names,
    lint_nccl,
    lint_overlay,
    lint_plan,
    lint_resources,
    lint_schema,
    lint_script,
    lint_secrets,
    lint_security,
    lint_start,
    lint_volumes,
)
from shardtune.cluster.lint_finding import SEVERITIES, Finding, Rule
from shardtune.cluster.lint_subject import Subject

if TYPE_CHECKING:
    from shardtune.cluster.manifests import Manifest, Manifests
    from shardtune.cluster.spec import ClusterJob
    from shardtune.plan.report import Plan

_CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    lint_resources.check_resources,
    lint_plan.check_plan,
    lint_volumes.check_volumes,
    lint_script.check_script,
    lint_names.check_names,
    lint_start.check_start,
    lint_overlay.check_overlay,
    lint_secrets.check_secrets,
    lint_nccl.check_nccl,
    lint_security.check_security,
    lint_schema.check_schema,
)
RULES: dict[str, tuple[Rule, ...]] = {
    "Memory, CPUs, GPUs": lint_resources.RULES,
    "The plan against the request": lint_plan.RULES,
    "Volumes": lint_volumes.RULES,
    "A script": lint_script.RULES,
    "Names": lint_names.RULES,
    "Image, start and end": lint_start.RULES,
    "What the overlay leaves": lint_overlay.RULES,
    "Secrets and references": lint_secrets.RULES,
    "NCCL, RDMA and other variables": lint_nccl.RULES,
    "Security profiles": lint_security.RULES,
    "Schemas of the API": lint_schema.RULES,
}


def lint(
    job: ClusterJob, manifests: Manifests | None, plan: Plan | None, target: str, crds: Sequence[Manifest] = ()
) -> list[Finding]:
    """All that is wrong with a job, errors first.

    Args:
        manifests: The job as it was rendered, after `pod_overlay`; None where the target has none. Its pod is then
            looked at as it would be.
        plan: What the run needs; None where nobody knows.
        target: Where it goes (`cluster.target`).
        crds: Of the site (`crd_schemas.read_crds`).
    """
    subject = Subject(job, target, manifests, plan, crds)
    found = [finding for check in _CHECKS for finding in check(subject)]
    once: dict[tuple[str, str, str], Finding] = {}
    for finding in found:  # pods of several roles are alike
        once.setdefault((finding.rule, finding.what, _in_pod(subject, finding.path)), finding)
    return sorted(once.values(), key=lambda finding: SEVERITIES.index(finding.severity))


def _in_pod(subject: Subject, path: str) -> str:
    """A path without the part that says which pod."""
    prefixes = sorted((pod.path for pod in subject.pods), key=len, reverse=True)
    return next((path.removeprefix(prefix) for prefix in prefixes if path.startswith(f"{prefix}.")), path)


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
