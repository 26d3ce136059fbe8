"""What does `shardtune cluster lint` print? And docs/cluster-lint.md: `python -m shardtune.cluster.lint_page`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint import RULES, has_errors
from shardtune.cluster.lint_finding import Finding
from shardtune.cluster.nccl_names import releases
from shardtune.terminal import count, say

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "yellow", "notice": "cyan"}


def show(console: Console, findings: Sequence[Finding], *, notices: bool = True) -> None:
    """A line for each, with its setting and its rule, and what to change; a verdict last.

    Args:
        notices: They are among the findings; otherwise the verdict does not speak of them.
    """
    for finding in findings:
        text = f"{finding.path}: {finding.what} [{finding.rule}]"
        say(console, finding.severity, text, _STYLES[finding.severity])
        say(console, "", f"→ {finding.fix}")
    numbers = {word: sum(one.severity == word for one in findings) for word in _STYLES}
    summary = ", ".join(count(numbers[word], word) for word in _STYLES if notices or word != "notice")
    style = next((_STYLES[word] for word in _STYLES if numbers[word] and word != "notice"), "green")
    say(console, "verdict", f"no findings ({summary})" if not findings else summary, style)


def as_json(findings: Sequence[Finding], job: str, target: str) -> dict[str, Any]:
    """docs/cluster-lint.md describes it."""
    return {
        "version": 1,
        "job": job,
        "target": target,
        "ok": not has_errors(findings),
        "findings": [vars(finding) for finding in findings],
    }


_INTRODUCTION = """\
# What lint checks

```console
$ shardtune cluster lint run.yaml                  # for cluster.target
$ shardtune cluster lint run.yaml --to pytorchjob
$ shardtune cluster lint run.yaml --json           # for programs
```

`shardtune submit` makes the same checks first, and sends nothing that has an error. They look at the section `cluster`
and at the pod templates as they are rendered, after `pod_overlay`, and compare all objects with the published schemas
(package extra `cluster`); nothing is asked of a cluster. A finding names a
setting (`cluster.memory`) or a place in the manifest (`spec.template.spec.containers[0].env[3]`), and what to write
instead. No finding repeats the value of a secret.

- **error**: the job would be refused, break, or lose its result. Exit code 1.
- **warning**: it may break on some clusters, or is slower than it could be. Exit code 0.
- **notice**: a setting without effect, or something that could not be checked. Exit code 0.

Invalid input (the config itself, a kind that cannot express a setting) exits with 2. `--json` prints `version`, `job`,
`target`, `ok` (no errors) and `findings`, each with `rule`, `severity`, `path`, `what` and `fix`.

The severity below is the worst a rule reports. This page is generated: `python -m shardtune.cluster.lint_page`.
"""


def rules_page() -> str:
    """docs/cluster-lint.md."""
    lines = [_INTRODUCTION]
    for heading, rules in RULES.items():
        lines += [f"## {heading}", "", "| rule | severity | reports | otherwise |", "|---|---|---|---|"]
        lines += [f"| `{rule.name}` | {rule.severity} | {rule.reports} | {rule.why} |" for rule in rules]
        lines.append("")
    nccl, torch = ", ".join(releases("nccl")), ", ".join(releases("torch"))
    lines += [
        "## Which variables exist",
        "",
        f"The names were read from the libraries of NCCL {nccl} and torch {torch},",
        "not from their documentation. Variables of NCCL's plugins (`NCCL_SHARP_*`, `NCCL_UCX_*`, …) are not judged.",
        "In the pod, `shardtune doctor` asks the libraries that are there ([doctor.md](doctor.md)).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(rules_page(), end="")
