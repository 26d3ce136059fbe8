"""Are the run's files where its pods find them, and does its result survive them?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardtune.cluster.lint_finding import Finding, Rule, error, notice, warning

if TYPE_CHECKING:
    from shardtune.cluster.lint_subject import Pod, Subject
    from shardtune.cluster.manifests import Manifest

RULES = (
    Rule(
        "mount-without-volume",
        "error",
        "A mount of a volume that the pod does not have.",
        "A CRD accepts it; the pods are refused later, one by one.",
    ),
    Rule(
        "unused-volume",
        "warning",
        "A volume that no container mounts.",
        "The pod waits for a claim it does not use.",
    ),
    Rule(
        "duplicate-mount",
        "error",
        "Two mounts at the same path.",
        "The API server refuses the pod.",
    ),
    Rule(
        "mount-path",
        "error",
        "A mount path that is not absolute, is `/`, or has a colon.",
        "The API server or the container runtime refuses it.",
    ),
    Rule(
        "shadowed-mount",
        "warning",
        "A mount inside another one.",
        "It hides what the outer volume has at that path.",
    ),
    Rule(
        "output-not-kept",
        "error",
        "`train.output_dir` is not on a volume that outlives the pod (a warning for docker, podman and a script, which "
        "may save elsewhere).",
        "The adapter and its checkpoints, or a script's logs and records, are deleted with the pod.",
    ),
    Rule(
        "read-only-output",
        "error",
        "`train.output_dir` (or `data.cache_dir`, `train.fallback_dir`) is on a read-only mount.",
        "Nothing can be saved.",
    ),
    Rule(
        "input-not-mounted",
        "warning",
        "The model, tokenizer or data is a path on no mount (a Hub's name is none).",
        "It must then be in the image.",
    ),
    Rule(
        "shared-claim",
        "notice",
        "A claim that several nodes mount.",
        "Unless its access mode is ReadWriteMany (ReadOnlyMany for what is read), pods on other nodes stay pending.",
    ),
)

# Volumes that go with the pod, or that cannot be written to.
_NOT_KEPT = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "image", "ephemeral")
_INPUTS = ("model.model_name_or_path", "model.tokenizer_name_or_path", "data.dataset_name_or_path")
_WRITTEN = ("train.output_dir", "data.cache_dir", "train.fallback_dir")
_DATA_FILES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")


def check_volumes(subject: Subject) -> Iterator[Finding]:
    if subject.target in ("slurm", "local-pods"):  # paths are those of the machines themselves
        return
    for pod in subject.pods:
        yield from _check_mounts(subject, pod)
        yield from _check_output(subject, pod)
    yield from _check_inputs(subject)
    yield from _check_shared_claims(subject)


def _check_mounts(subject: Subject, pod: Pod) -> Iterator[Finding]:
    volumes = [str(volume.get("name")) for volume in pod.spec.get("volumes") or ()]
    there_are = f"there are {', '.join(volumes)}" if volumes else "the pod has none"
    mounted: set[str] = set()
    for path, container in pod.containers:
        mounts = container.get("volumeMounts") or ()
        mounted |= {str(mount.get("name")) for mount in mounts}
        for index, mount in enumerate(mounts):
            where = _where(subject, mount, f"{path}.volumeMounts[{index}]")
            if mount.get("name") not in volumes:
                what = f"'{mount.get('name')}' is mounted at {mount.get('mountPath')}, but the pod has no such volume"
                fix = f"Add it to the overlay's spec.volumes (cluster.volumes does); {there_are}."
                yield error("mount-without-volume", where, what, fix)
            yield from _check_path(where, str(mount.get("mountPath", "")))
        yield from _check_overlaps(subject, path, mounts)
    for index, name in enumerate(volumes):
        if name not in mounted:
            what = f"the volume '{name}' is mounted by no container"
            fix = "Add a volumeMount, or remove the volume."
            yield warning("unused-volume", f"{pod.path}.spec.volumes[{index}]", what, fix)


def _where(subject: Subject, mount: Manifest, otherwise: str) -> str:
    """The setting that a mount comes from, or its place in the template."""
    for index, volume in enumerate(subject.settings.volumes):
        if volume.path == mount.get("mountPath"):
            return f"cluster.volumes[{index}].path"
    return otherwise


def _check_path(where: str, path: str) -> Iterator[Finding]:
    if not path.startswith("/"):
        what = f"'{path}' is not absolute"
        yield error("mount-path", where, what, f"Write the path in the container, such as /{path.lstrip('./~')}.")
    elif PurePosixPath(path) == PurePosixPath("/") or ":" in path:
        yield error("mount-path", where, f"nothing can be mounted at '{path}'", "Choose a folder, such as /runs.")


def _check_overlaps(subject: Subject, path: str, mounts: Any) -> Iterator[Finding]:
    paths = [PurePosixPath(str(mount.get("mountPath", ""))) for mount in mounts]
    for twice in (one for one, number in Counter(paths).items() if number > 1):
        where = _where(subject, {"mountPath": str(twice)}, f"{path}.volumeMounts")
        yield error("duplicate-mount", where, f"two volumes are mounted at {twice}", "Mount one of them elsewhere.")
    for outer in dict.fromkeys(paths):
        for inner in dict.fromkeys(paths):
            if outer in inner.parents and outer != PurePosixPath("/"):
                where = _where(subject, {"mountPath": str(inner)}, f"{path}.volumeMounts")
                what = f"{inner} is mounted inside {outer}, and hides what that volume has there"
                yield warning("shadowed-mount", where, what, "Mount them beside each other, unless this is meant.")


def mount_of(container: Manifest, path: PurePosixPath) -> Manifest | None:
    """The innermost mount that a path is on."""
    mounts = [
        mount
        for mount in container.get("volumeMounts") or ()
        if (folder := PurePosixPath(str(mount.get("mountPath", "")))) == path or folder in path.parents
    ]
    return max(mounts, key=lambda mount: len(str(mount["mountPath"])), default=None)


def _check_output(subject: Subject, pod: Pod) -> Iterator[Finding]:
    _, container = pod.trainer
    output = subject.job.output_dir
    for key in _WRITTEN:
        name = subject.run_values.get(key)
        if not isinstance(name, str):
            continue
        folder = output if key == "train.output_dir" and output is not None else subject.in_container(name)
        mount = mount_of(container, folder)
        if mount is not None and mount.get("readOnly"):
            what = f"{folder} is on the read-only mount {mount['mountPath']}"
            yield error("read-only-output", key, what, f"Mount it read-write, or set {key} to another volume.")
    if output is None:
        return
    of_script = subject.job.script is not None
    report = error if subject.is_kubernetes and not of_script else warning
    written = str(subject.run_values.get("train.output_dir", output))
    if not subject.settings.working_dir and not written.startswith("/"):
        what = f"train.output_dir ({written}) is relative to the image's working directory, which is on no volume"
        yield report("output-not-kept", "train.output_dir", what, _keep_fix(subject))
        return
    mount = mount_of(container, output)
    volumes = {volume.get("name"): volume for volume in pod.spec.get("volumes") or ()}
    volume = volumes.get(mount.get("name")) if mount is not None else None
    if volume is not None and not set(_NOT_KEPT) & set(volume):
        return
    where = f"on the {next(iter(set(_NOT_KEPT) & set(volume)))} volume '{volume['name']}'" if volume else "on no volume"
    lost = "the run's logs and records are" if of_script else "the adapter is"
    what = f"train.output_dir ({output}) is {where}: {lost} deleted with the pod"
    yield report("output-not-kept", "train.output_dir", what, _keep_fix(subject))


def _keep_fix(subject: Subject) -> str:
    paths = [one.path for one in subject.settings.volumes if not one.read_only and one.path.startswith("/")]
    example = f", such as {paths[0]}" if paths else ""
    return f"Set it to an absolute path on a volume of cluster.volumes{example}."


def _check_inputs(subject: Subject) -> Iterator[Finding]:
    _, container = subject.pods[0].trainer
    for key in _INPUTS:
        name = subject.run_values.get(key)
        if not isinstance(name, str) or not name or not _is_path(name):
            continue
        known = name.startswith("/") or (subject.settings.working_dir and not name.startswith("~"))
        if not known or mount_of(container, subject.in_container(name)) is None:
            here = " (it is on this machine, but the pod cannot see it)" if Path(name).expanduser().exists() else ""
            what = f"{name} is on no mount{here}"
            fix = f"Mount its claim (cluster.volumes) and set {key} to the path there, unless the image has it."
            yield warning("input-not-mounted", key, what, fix)


def _is_path(name: str) -> bool:
    """A path in the container rather than a Hub's name; `org/name` is a path only where it exists here."""
    if "://" in name:
        return False
    written_so = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith(_DATA_FILES)
    return written_so or any(sign in name for sign in "*?[") or Path(name).exists()


def _check_shared_claims(subject: Subject) -> Iterator[Finding]:
    claims = list(dict.fromkeys(volume.claim for volume in subject.settings.volumes))
    if subject.job.nodes > 1 and subject.is_kubernetes and claims:
        what = f"{subject.job.nodes} pods mount {', '.join(claims)}"
        fix = (
            "The access mode must be ReadWriteMany (ReadOnlyMany for what is only read), or pods on other nodes stay "
            "pending: kubectl get pvc."
        )
        yield notice("shared-claim", "cluster.volumes", what, fix)
