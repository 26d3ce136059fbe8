"""Will the pods start, together, and end in time? The image, the containers, queues, and the grace period."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardtune.cluster.lint_finding import Finding, Rule, error, notice, warning
from shardtune.cluster.lint_plan import stop_seconds
from shardtune.cluster.pod import container_command
from shardtune.terminal import count, duration

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Subject

RULES = (
    Rule(
        "image-missing",
        "error",
        "No image (Slurm and local-pods need none).",
        "The pod is refused.",
    ),
    Rule(
        "image-not-pinned",
        "warning",
        "An image with the tag `latest`, without a tag, or without a digest.",
        "Nodes, and a restart days later, may run different code.",
    ),
    Rule(
        "init-image",
        "warning",
        "A PyTorchJob of several nodes whose image names its registry.",
        "The training operator adds an init container with `alpine:3.10` from its default registry to every "
        "worker; where that cannot be pulled, workers wait for ever.",
    ),
    Rule(
        "extra-container",
        "error",
        "A container that only `pod_overlay` has: without an image, or beside the training (a warning).",
        "The training's container is called `trainer` in the overlay; another name is another container, and a "
        "job ends when all of them have ended.",
    ),
    Rule(
        "shell-command",
        "warning",
        "A command that is a shell, and starts the training without `exec`.",
        "SIGTERM reaches the shell and not the training: no save before the pod is killed.",
    ),
    Rule(
        "topology-without-queue",
        "error",
        "`topology` without `queue`.",
        "Only Kueue reads it.",
    ),
    Rule(
        "gang",
        "warning",
        "Gang scheduling beside Kueue's queue or Run:ai, which do it themselves; several nodes without any of "
        "them (a notice).",
        "Two schedulers wait for each other; without one, some pods hold their nodes while others are pending.",
    ),
    Rule(
        "grace-period",
        "warning",
        "A grace period shorter than a step and a save take by the plan, or a `terminationGracePeriodSeconds` in "
        "the overlay that is not the one the run was told.",
        "The pod is killed in the middle of a save; the run resumes from the checkpoint before it.",
    ),
)

_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")


def check_start(subject: Subject) -> Iterator[Finding]:
    yield from _check_image(subject)
    yield from _check_containers(subject)
    yield from _check_shell(subject)
    yield from _check_scheduling(subject)
    yield from _check_grace(subject)


def _check_image(subject: Subject) -> Iterator[Finding]:
    if subject.target in ("slurm", "local-pods"):
        return
    images = {str(image) for _, container in subject.containers if (image := container.get("image"))}
    _, trainer = subject.pods[0].trainer
    if not trainer.get("image"):
        fix = "Set cluster.image; the Containerfile of the repository makes one (docs/cluster.md)."
        yield error("image-missing", "cluster.image", "there is no image", fix)
    for image in sorted(images):
        path = "cluster.image" if image == subject.settings.image else _path_of_image(subject, image)
        if _DIGEST.fullmatch(image):
            continue
        tag = image.rpartition("/")[2].partition(":")[2]
        named = (
            "has no tag, so it is `latest`, which" if not tag else "`latest`" if tag == "latest" else f"the tag {tag}"
        )
        what = f"{image}: {named} may be another image tomorrow"
        name = image.partition("@")[0].removesuffix(":latest")
        fix = f"Add its digest: {name}@sha256:… (skopeo inspect, or podman image inspect)."
        yield warning("image-not-pinned", path, what, fix)
    image = str(trainer.get("image") or "")
    registry = image.partition("/")[0] if "/" in image else ""
    if subject.kind == "pytorchjob" and subject.job.nodes > 1 and re.search(r"[.:]", registry):
        what = "the training operator adds an init container with alpine:3.10 to every worker"
        fix = (
            "Where nodes cannot pull that (an air-gapped cluster), an administrator sets "
            "--pytorch-init-container-image of the operator to a mirrored image; or use --to jobset or trainjob."
        )
        yield warning("init-image", "cluster.image", what, fix)


def _path_of_image(subject: Subject, image: str) -> str:
    return next(f"{path}.image" for path, container in subject.containers if container.get("image") == image)


def _check_containers(subject: Subject) -> Iterator[Finding]:
    for pod in subject.pods:
        trainer, _ = pod.trainer
        for path, container in pod.containers:
            if path == trainer or container.get("name") == "doctor":
                continue
            name = container.get("name")
            if not container.get("image"):
                what = f"the container '{name}' has no image"
                fix = "The container that trains is called `trainer` in pod_overlay, whatever the kind calls it."
                yield error("extra-container", path, what, fix)
            elif ".containers[" in path:
                what = f"the container '{name}' runs beside the training; the job ends when it has ended too"
                fix = "Make it an init container with restartPolicy: Always (a sidecar), which ends with the training."
                yield warning("extra-container", path, what, fix)


def _check_shell(subject: Subject) -> Iterator[Finding]:
    for pod in subject.pods:
        path, container = pod.trainer
        words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
        if _hides_signals(words):
            where = "cluster.command" if words == container_command(subject.job) else f"{path}.command"
            what = f"{words[0]} is the container's main process, and passes SIGTERM to nothing"
            fix = "Write `exec` before the last command of the script, or give the words of the program themselves."
            yield warning("shell-command", where, what, fix)


def _hides_signals(words: Sequence[str]) -> bool:
    """`sh -c 'pip install x && shardtune train y'`. A shell replaces itself by a single simple command."""
    if not words or words[0].rpartition("/")[2] not in _SHELLS:
        return False
    script = next((words[i + 1] for i, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word)), "")
    last = [part.strip() for part in re.split(r"&&|\|\||;|\n", script) if part.strip()]
    return len(last) > 1 and not last[-1].startswith("exec ")


def _check_scheduling(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    if settings.topology and not settings.queue:
        what = f"topology ({settings.topology}) is read by Kueue, and there is no queue"
        yield error("topology-without-queue", "cluster.topology", what, "Set cluster.queue, or use cluster.affinity.")
    if not subject.is_kubernetes:
        return
    does_it = "Run:ai" if subject.target == "runai" else "Kueue" if settings.queue else ""
    if settings.gang_scheduling != "none" and does_it:
        what = f"gang_scheduling is {settings.gang_scheduling}, but {does_it} starts all pods or none by itself"
        yield warning("gang", "cluster.gang_scheduling", what, "Set cluster.gang_scheduling: none.")
    elif subject.job.nodes > 1 and settings.gang_scheduling == "none" and not does_it:
        pods = count(subject.job.nodes, "pod")
        holding = " with their GPUs" if subject.has_gpus else ""
        what = f"nothing guarantees that all {pods} start together: some may wait{holding} for the others"
        yield notice("gang", "cluster.gang_scheduling", what, "Set cluster.queue (Kueue) or cluster.gang_scheduling.")


def _check_grace(subject: Subject) -> Iterator[Finding]:
    grace = subject.job.grace_seconds
    if subject.plan is not None and (needed := stop_seconds(subject.plan)) > grace:
        what = f"{grace} s are too short for a step and a save ({duration(needed)} by the plan, on a busy volume)"
        yield warning("grace-period", "cluster.grace_seconds", what, "Set cluster.grace_seconds: auto.")
    for pod in subject.pods:
        given = pod.spec.get("terminationGracePeriodSeconds")
        if given is not None and given != grace:
            what = f"the pod is killed after {given} s, but the run is told {grace} s"
            path = f"{pod.path}.spec.terminationGracePeriodSeconds"
            longer = isinstance(given, int) and given > grace
            fix = (
                f"Remove it, and set cluster.grace_seconds: {given}."
                if longer
                else (f"Remove it: {grace} s are the time to save; cluster.grace_seconds sets it for both.")
            )
            yield warning("grace-period", path, what, fix)
