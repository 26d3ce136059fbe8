"""Is the script where the pods look for it? A job carries its command line, not the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cluster.lint_finding import Finding, Rule, notice, warning
from shardtune.cluster.lint_volumes import mount_of

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject

RULES = (
    Rule(
        "script-not-mounted",
        "warning",
        "The script behind `--` is on no mount, but on this machine (a notice if it is not here either). A module is "
        "not looked for.",
        "It must then be in the image: a job does not carry it.",
    ),
    Rule(
        "script-not-here",
        "warning",
        "Slurm: there is no file at the script's path on this machine.",
        "If the nodes do not see it either, the job fails when it starts, perhaps hours later.",
    ),
)


def check_script(subject: Subject) -> Iterator[Finding]:
    script = subject.job.script
    if script is None or script.is_module or subject.target == "local-pods":  # its pods say so at once
        return
    name, working_dir = script.target, subject.settings.working_dir
    if subject.target == "slurm":
        path = Path(working_dir or ".") / name
        if not path.is_file():
            fix = "Correct the path, or set cluster.working_dir, where relative paths start."
            yield warning("script-not-here", "script", f"there is no file {path} on this machine", fix)
        return
    path_there = subject.in_container(name)
    _, container = subject.pods[0].trainer
    if (name.startswith("/") or working_dir) and mount_of(container, path_there) is not None:
        return
    if name.startswith("/") or working_dir:
        where = f"{path_there} is on no mount, so it must be in the image"
    else:
        where = f"{name} is relative to the image's working directory, so it must be in the image"
    fix = "Mount the volume that has it (cluster.volumes) and give the path there, unless the image has it."
    if Path(name).is_file():
        yield warning("script-not-mounted", "script", f"{where}: the file on this machine is not sent", fix)
    else:
        yield notice("script-not-mounted", "script", where, fix)
