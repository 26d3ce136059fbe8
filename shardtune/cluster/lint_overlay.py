"""Does `pod_overlay` leave the job able to start, and to be found? What it took away, and how its pods restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardtune.cluster.lint_finding import Finding, Rule, error, warning
from shardtune.cluster.lint_subject import Pod
from shardtune.cluster.pod import JOB_LABEL, RUN_LABEL, pod_template
from shardtune.cluster.render import RENDERERS

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject

RULES = (
    Rule(
        "restart-policy",
        "error",
        "A `restartPolicy` of the pod other than `Never`; any at all for a PyTorchJob (a warning).",
        "A Job with a pod failure policy, which TrainJob, JobSet and Job have here, is refused with another one, and "
        "no pod is made. The training operator overwrites it.",
    ),
    Rule(
        "no-command",
        "error",
        "The overlay removes or empties the command of the training's container.",
        "The image's own command would run instead of the training.",
    ),
    Rule(
        "removed-variable",
        "error",
        "The overlay removes variables that the job was rendered with (`env: null`).",
        "Nodes do not find or trust each other (`MASTER_ADDR`, `SHARDTUNE_NODES`, `SHARDTUNE_SECRET`), or a setting "
        "has no effect.",
    ),
    Rule(
        "removed-label",
        "error",
        "The overlay removes or changes the labels that say which job a pod belongs to (`metadata: null`).",
        "`shardtune status` does not count the pods, selectors of the site miss them, and so does the Service by which "
        "the nodes of a Job find each other.",
    ),
)

_FOUND_BY = (JOB_LABEL, RUN_LABEL, "app.kubernetes.io/name", "app.kubernetes.io/managed-by")
_OVERLAY = "cluster.pod_overlay"


def check_overlay(subject: Subject) -> Iterator[Finding]:
    if not subject.settings.pod_overlay or not (subject.is_kubernetes or subject.manifests is not None):
        return
    for pod, plain in zip(subject.pods, _without_overlay(subject), strict=False):
        yield from _check_restart(subject, pod)
        yield from _check_command(pod)
        yield from _check_variables(pod, plain)
        yield from _check_labels(pod, plain)


def _without_overlay(subject: Subject) -> list[Pod]:
    """The same pods, as they would be without it."""
    job = replace(subject.job, settings=subject.settings.model_copy(update={"pod_overlay": {}}))
    if subject.manifests is None:
        return [Pod("pod", pod_template(job))]
    return [Pod("pod", template) for template in RENDERERS[subject.workload_kind](job).templates.values()]


def _check_restart(subject: Subject, pod: Pod) -> Iterator[Finding]:
    path = f"{_OVERLAY}.spec.restartPolicy"
    if subject.workload_kind == "pytorchjob":
        written = (subject.settings.pod_overlay.get("spec") or {}).get("restartPolicy")
        if written is not None:
            what = f"restartPolicy: {written} has no effect: the training operator overwrites it"
            fix = f"Remove it. cluster.restarts ({subject.settings.restarts}) says how often a failed job starts again."
            yield warning("restart-policy", path, what, fix)
        return
    policy = pod.spec.get("restartPolicy")
    if policy != "Never":
        named = f"restartPolicy: {policy}" if policy else "there is no restartPolicy"
        what = f"{named}: the API server takes this job's pods with Never alone, so it would not start"
        fix = "Remove it from the overlay. cluster.restarts says how often a failed job starts again."
        yield error("restart-policy", path, what, fix)


def _check_command(pod: Pod) -> Iterator[Finding]:
    path, container = pod.trainer
    if not container.get("command"):
        what = "the container that trains has no command: the image's own would run"
        fix = "Remove `command` from the overlay, or set cluster.command."
        yield error("no-command", f"{path}.command", what, fix)


def _check_variables(pod: Pod, plain: Pod) -> Iterator[Finding]:
    path, container = pod.trainer
    there = {str(entry.get("name")) for entry in container.get("env") or ()}
    removed = [name for entry in plain.trainer[1].get("env") or () if (name := str(entry["name"])) not in there]
    if removed:
        what = f"the overlay removes variables that the job needs: {', '.join(removed)}"
        fix = "Remove `env: null` from the overlay; the variables that it lists are added to those of the job."
        yield error("removed-variable", f"{path}.env", what, fix)


def _check_labels(pod: Pod, plain: Pod) -> Iterator[Finding]:
    ours, there = plain.metadata["labels"], pod.metadata.get("labels") or {}
    changed = [name for name in _FOUND_BY if there.get(name) != ours[name]]
    if changed:
        what = f"the overlay removes or changes labels by which the job's pods are found: {', '.join(changed)}"
        fix = "Leave them out of the overlay; the labels that it lists are added to those of the job."
        yield error("removed-label", f"{pod.path}.metadata.labels", what, fix)
