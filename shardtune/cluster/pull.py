"""How do a run's files come back from the cluster? As a tar stream out of a pod that mounts the volume."""

from __future__ import annotations

import io
import os
import secrets
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from shardtune.cluster.api import Cluster
from shardtune.cluster.api_errors import ApiError, ClusterError
from shardtune.cluster.exec_stream import Execution
from shardtune.cluster.manifests import Manifest
from shardtune.cluster.pod import RUN_FOLDER
from shardtune.cluster.resources import POD
from shardtune.cluster.workloads import (
    Workload,
    find_workload,
    main_container,
    newest_by_rank,
    pod_template_of,
    pods_of,
)
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.run.folder import CHECKPOINTS

_HELPER_SECONDS = 3600  # then the helper pod ends by itself, should we die before we delete it
_START_SECONDS = 300.0
_KEPT = (
    "serviceAccountName", "imagePullSecrets", "securityContext", "nodeSelector", "tolerations", "affinity",
)  # fmt: skip
_CHANGED = b"file changed as we read it"


@dataclass(frozen=True)
class Pulled:
    """What was fetched: `kept` are files that were here already and left as they are, `skipped` links and the like."""

    folder: Path
    files: int
    bytes: int
    kept: tuple[str, ...]
    skipped: tuple[str, ...]
    changed_meanwhile: bool


def pull(
    cluster: Cluster, name: str, to: Path | None, *, everything: bool, force: bool, run_folder: str | None = None
) -> Pulled:
    """Fetch a run's folder, without its checkpoints unless `everything`.

    Args:
        to: Where the folder is put, under the run's name; default ./runs.
        force: Overwrite files that are here.
        run_folder: Where the run is in the container; default: what the job says of itself.
    """
    workload = find_workload(cluster, name)
    source = PurePosixPath(run_folder or workload.annotations.get(RUN_FOLDER) or "")
    if not source.name:
        raise UserInputError(
            f"The job '{name}' does not say where its run's folder is: it runs a command of its own.",
            fix="Name it: --folder /path/in/the/container.",
        )
    target = (to or Path("runs")) / source.name
    with _pod(cluster, workload) as (pod, container):
        command = ["tar", "-C", str(source.parent), "-cf", "-"]
        command += [] if everything else [f"--exclude={source.name}/{CHECKPOINTS}"]
        with _execute(cluster, pod, container, [*command, source.name], workload) as execution:
            refused = partial(_no_commands, cluster, pod)
            return _receive(execution, source, target, refused, force=force)


def _execute(cluster: Cluster, pod: str, container: str, command: list[str], workload: Workload) -> Execution:
    try:
        return cluster.execute(pod, container, command, workload.namespace)
    except ApiError as error:
        if error.status == 401 or "cannot create resource" in error.message or "cannot get resource" in error.message:
            raise  # it says what is missing
        raise _no_commands(cluster, pod, error.message) from None


def _no_commands(cluster: Cluster, pod: str, said: str) -> ClusterError:
    return ClusterError(
        f"No command can be run in pod {pod}, and so nothing can be read from its volume.",
        why=f"The server says: {next(iter(said.splitlines()), '') or 'nothing'}",
        fix="You need permission to create and get pods/exec; check it: kubectl auth can-i create pods "
        f"--subresource=exec{cluster.options}. If you have it, the cluster's administrator can tell why exec fails; "
        "until then read the volume from another pod or machine that mounts it.",
    )


def _lacks_tar(said: str) -> bool:
    """A container runtime's words for a command that the image does not have."""
    return "executable file not found" in said or 'exec: "tar"' in said


def _receive(
    execution: Execution, source: PurePosixPath, target: Path, refused: Callable[[str], ClusterError], *, force: bool
) -> Pulled:
    try:
        found = unpack(_Reader(iter(execution)), source.name, target, force=force)
        for _ in execution:  # the padding behind the archive's end, and the exit code
            pass
    except (tarfile.TarError, EOFError) as error:
        _raise_if_failed(execution, source, refused)
        raise ClusterError(f"What came back from '{source}' is not a whole archive.", why=str(error)) from None
    changed = execution.exit_code == 1 and _CHANGED in execution.stderr
    if not changed:
        _raise_if_failed(execution, source, refused)
    return replace(found, changed_meanwhile=changed)


def _raise_if_failed(execution: Execution, source: PurePosixPath, refused: Callable[[str], ClusterError]) -> None:
    if not execution.exit_code:
        return
    said = execution.stderr.decode("utf-8", "replace").strip() or execution.message
    if execution.was_refused and not _lacks_tar(said):
        raise refused(execution.message)
    if "No such file" in said or "Cannot stat" in said or "Cannot open: No such" in said:
        raise UserInputError(
            f"There is no folder '{source}' on the volume.", why=said,
            fix="The run has written nothing yet, or somewhere else (--folder).",
        )  # fmt: skip
    if _lacks_tar(said) or "tar: not found" in said or execution.exit_code in (126, 127):
        raise ClusterError(
            "The image has no `tar`.", why=said, fix="Use an image with tar, or read the volume otherwise."
        )
    raise ClusterError(f"`tar` in the pod failed with exit code {execution.exit_code}.", why=said)


class _Reader(io.RawIOBase):
    """The chunks of a stream as a file for tarfile."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self._rest) < size or size < 0:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._rest += chunk
        size = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


def unpack(stream: io.RawIOBase, top: str, target: Path, *, force: bool) -> Pulled:
    """Unpack a tar stream whose one top folder is `top` into `target`: files and folders only.

    Raises:
        ClusterError: a name leads out of the folder.
    """
    files, size = 0, 0
    kept: list[str] = []
    skipped: list[str] = []
    with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            if parts[:1] != (top,) or ".." in parts or PurePosixPath(member.name).is_absolute():
                raise ClusterError(f"The archive holds '{member.name}', which is not in the run's folder: refused.")
            path, name = target.joinpath(*parts[1:]), "/".join(parts[1:])
            _check_no_link(path, target)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif not member.isfile():
                skipped.append(name)
            elif path.exists() and not force:
                kept.append(name)
            else:
                _write(archive, member, path)
                files, size = files + 1, size + member.size
    return Pulled(target, files, size, tuple(kept), tuple(skipped), changed_meanwhile=False)


def _check_no_link(path: Path, target: Path) -> None:
    """A link that lies here already must not lead what we write elsewhere."""
    for part in (path, *path.parents):
        if part == target.parent:
            return
        if part.is_symlink():
            raise UserInputError(f"'{part}' is a link: nothing is written through it.", fix="Use another folder: --to.")


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Through a file beside it, so that an interrupted pull leaves no half file under a good name."""
    source = archive.extractfile(member)
    assert source is not None  # it is a regular file
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("xb") as file:
            while data := source.read(2**20):
                file.write(data)
        if partial.stat().st_size != member.size:
            raise ClusterError(f"'{member.name}' came back with {partial.stat().st_size} of {member.size} bytes.")
        os.utime(partial, (member.mtime, member.mtime))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _pod(cluster: Cluster, workload: Workload) -> Iterator[tuple[str, str]]:
    """A running pod of the job, or a helper with the same volumes, which is deleted in every case."""
    for pod in newest_by_rank(pods_of(cluster, workload)).values():
        name = main_container(pod)
        statuses = (pod.get("status") or {}).get("containerStatuses") or ()
        if any(one["name"] == name and "running" in (one.get("state") or {}) for one in statuses):
            yield str(pod["metadata"]["name"]), name
            return
    helper = helper_pod(workload, pod_template_of(cluster, workload))
    name = str(helper["metadata"]["name"])
    print(f"No pod of the job is running: starting {name} to read its volumes.", file=sys.stderr)
    try:
        cluster.create(helper)
        _wait_until_running(cluster, name, workload.namespace)
        yield name, "pull"
    finally:
        try:
            cluster.delete(POD, name, workload.namespace, grace_seconds=0)
        except ApiError as error:
            if error.status != 404:
                print(f"The pod {name} could not be deleted: {error.message}", file=sys.stderr)


def helper_pod(workload: Workload, template: Manifest) -> Manifest:
    """A pod with the job's image and volumes, read-only, that waits."""
    spec = template["spec"]
    trainer = next((one for one in spec["containers"] if one["name"] in ("trainer", "pytorch", "node")), None)
    trainer = trainer or spec["containers"][0]
    claims = [one for one in spec.get("volumes") or () if "persistentVolumeClaim" in one]
    if not claims:
        raise UserInputError(
            f"The job '{workload.name}' mounts no PersistentVolumeClaim: what it wrote is gone with its pods.",
            fix="Set cluster.volumes and put train.output_dir on one of them.",
        )
    names = {str(one["name"]) for one in claims}
    mounts = [{**one, "readOnly": True} for one in trainer.get("volumeMounts") or () if one["name"] in names]
    small = {"cpu": "500m", "memory": "512Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{workload.name}-pull-{secrets.token_hex(3)}",
            "namespace": workload.namespace,
            "labels": {"app.kubernetes.io/name": "shardtune", "app.kubernetes.io/component": "pull"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _HELPER_SECONDS,
            "terminationGracePeriodSeconds": 0,
            **{name: spec[name] for name in _KEPT if spec.get(name)},
            "volumes": claims,
            "containers": [
                {
                    "name": "pull",
                    "image": trainer["image"],
                    "command": ["sleep", str(_HELPER_SECONDS)],
                    "resources": {"requests": small, "limits": small},
                    "volumeMounts": mounts,
                    "securityContext": {"allowPrivilegeEscalation": False},
                    **({"workingDir": trainer["workingDir"]} if trainer.get("workingDir") else {}),
                }
            ],
        },
    }


def _wait_until_running(cluster: Cluster, name: str, namespace: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    pod: Manifest = {}
    while time.monotonic() < deadline:
        pod = cluster.get(POD, name, namespace)
        statuses = (pod.get("status") or {}).get("containerStatuses") or ()
        if any("running" in (one.get("state") or {}) for one in statuses):
            return
        if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
            break
        time.sleep(0.5)
    from shardtune.cluster.describe import pod_reasons

    reasons = list(pod_reasons([pod], (), cluster.options))
    raise ShardtuneError(
        f"The pod {name}, which reads the volumes, did not start within {_START_SECONDS:.0f} s.",
        why=" ".join(f"{one.what} {one.said}" for one in reasons),
        fix=reasons[0].fix if reasons else "Try again later, or copy the files with kubectl cp.",
    )
