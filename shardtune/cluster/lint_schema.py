"""Would an API server take the rendered objects? The problems that published schemas show, as findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardtune.cluster.lint_finding import Finding, Rule, error, notice
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject
    from shardtune.cluster.schemas import SchemaProblem

NOT_CHECKED = "schema-not-checked"
RULES = (
    Rule(
        "schema",
        "error",
        'A field that is unknown, missing, or of another type: `comand: [x]`, `command: bash`, `hostNetwork: "yes"`.',
        "The API server refuses the object, or drops the field.",
    ),
    Rule(
        NOT_CHECKED,
        "notice",
        "The packages that have the schemas are not installed (`pip install 'shardtune[cluster]'`).",
        "Wrong fields are found by the API server. `submit` insists on the check.",
    ),
)

# Where a value may be a secret: it is not repeated.
_PRIVATE = re.compile(r"\.(env\[|args\b|command\b)|annotations|stringData|\bdata\b")

_RESOURCES = re.compile(r"\.resources\.(requests|limits)\b")


def check_schema(subject: Subject) -> Iterator[Finding]:
    if subject.manifests is None:
        return
    from shardtune.cluster.schemas import validate

    try:
        problems = validate(subject.manifests, subject.crds).problems
    except UserInputError as missing:  # a package of the extra
        yield notice(NOT_CHECKED, "cluster", missing.what.rstrip("."), missing.fix or "")
        return
    workload = f"{subject.manifests.workload.get('kind')} "
    for problem in problems:
        if _RESOURCES.search(problem.path) and "is not a quantity" in problem.message:
            continue  # the rules of resources say it at the setting, with what was meant
        kind, _, _ = problem.manifest.partition(" ")
        place = problem.path or "apiVersion"
        path = place if problem.manifest.startswith(workload) else f"{kind}:{place}"
        yield error("schema", path, _message(problem), _fix(subject))


def _message(problem: SchemaProblem) -> str:
    return problem.message.partition(", is ")[0] if _PRIVATE.search(problem.path) else problem.message


def _fix(subject: Subject) -> str:
    if subject.settings.pod_overlay:
        return "Correct it in cluster.pod_overlay, or in the setting of `cluster` that it comes from."
    return "Correct the setting of `cluster` that it comes from."
