"""May the job be sent? What `submit` asks before it sends anything: the findings of `cluster lint`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cluster.crd_schemas import read_crds
from shardtune.cluster.lint import has_errors, lint
from shardtune.cluster.lint_page import show
from shardtune.cluster.lint_schema import NOT_CHECKED
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from rich.console import Console

    from shardtune.cluster.manifests import Manifests
    from shardtune.cluster.spec import ClusterJob
    from shardtune.plan.report import Plan


def check_before_sending(
    console: Console,
    job: ClusterJob,
    manifests: Manifests | None,
    plan: Plan | None,
    target: str,
    *,
    crd_dir: Path | None = None,
    notices: bool = False,
) -> None:
    """Show what lint finds, and raise if the job must not be sent.

    Args:
        crd_dir: The site's CRD files, which come before other schemas.
        notices: Show them, too.

    Raises:
        UserInputError: there are errors, or the packages are missing that the check of manifests needs.
    """
    findings = lint(job, manifests, plan, target, read_crds(crd_dir) if crd_dir else ())
    for finding in findings:
        if finding.rule == NOT_CHECKED:
            raise UserInputError(f"{finding.what}.", fix=finding.fix)
    shown = [one for one in findings if notices or one.severity != "notice"]
    if shown:
        show(console, shown, notices=notices)
    if has_errors(findings):
        raise UserInputError("The job was not sent.", why="It has errors.", fix="Correct what is named above.")
