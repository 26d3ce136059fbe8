"""Which objects does a job become on Kubernetes, and how are they written down? As YAML, or as a kustomize folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod import SECRET_KEY
from shardtune.cluster.render_job import render_job
from shardtune.cluster.render_jobset import render_jobset
from shardtune.cluster.render_pytorchjob import render_pytorchjob
from shardtune.cluster.render_trainjob import render_trainjob
from shardtune.cluster.spec import CONFIG_FILE, ClusterJob
from shardtune.durable import replace_file
from shardtune.errors import UserInputError

RENDERERS: Mapping[str, Callable[[ClusterJob], Manifests]] = {
    "trainjob": render_trainjob,
    "pytorchjob": render_pytorchjob,
    "jobset": render_jobset,
    "job": render_job,
}
PLACEHOLDER = "REPLACE-ME"  # shorter than the launcher accepts: a job that is sent with it does not start
SECRET_FILE = "secret.env"
_HEADER = "# Written by `shardtune submit`; it will be overwritten.\n"
_FIRST_KEYS = ("apiVersion", "kind", "metadata", "name", "namespace", "spec")


def render(job: ClusterJob, target: str) -> Manifests:
    """The job as objects of Kubernetes: plain dicts, nothing of a cluster is asked.

    Args:
        target: trainjob, pytorchjob, jobset or job.

    Raises:
        UserInputError: a setting that the kind cannot express, or a target that is not a kind.
    """
    if target not in RENDERERS:
        raise UserInputError(f"'{target}' is not a kind of Kubernetes.", fix=f"Use one of {', '.join(RENDERERS)}.")
    if job.settings.topology and not job.settings.queue:
        raise UserInputError(
            f"cluster.topology ({job.settings.topology}) needs cluster.queue.",
            why="Kueue places the pods by it, and only those of a job in one of its queues.",
            fix="Set cluster.queue to Kueue's LocalQueue, or use cluster.affinity or cluster.topology_spread.",
        )
    return RENDERERS[target](job)


def to_yaml(manifests: Iterable[Manifest]) -> str:
    """All objects as YAML documents, in the order in which they are created. No value of a Secret is in it."""
    return "---\n".join(_document(manifest) for manifest in manifests)


def write_kustomize(manifests: Manifests, folder: Path) -> list[Path]:
    """Write a folder for `kubectl apply -k`: a file for each object, run.yaml as it is, and the nodes' secret in a
    file that only its owner may read and git does not see.

    Returns:
        The files.

    Raises:
        UserInputError: the folder holds a kustomization of somebody else.
    """
    _check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    resources: dict[str, str] = {}
    others: dict[str, str] = {}
    kustomization: Manifest = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    if manifests.workload["kind"] == "TrainJob":
        # In our order: it is refused before its runtime is there, and by name it would come first.
        kustomization["sortOptions"] = {"order": "fifo"}
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            kustomization["secretGenerator"] = [{**_generator(manifest), "envs": [SECRET_FILE]}]
            others[".gitignore"] = f"{SECRET_FILE}\n"
        elif manifest["kind"] == "ConfigMap":
            kustomization["configMapGenerator"] = [{**_generator(manifest), "files": sorted(manifest["data"])}]
            others |= manifest["data"]
        else:
            resources[f"{manifest['kind'].lower()}.yaml"] = _document(manifest)
    kustomization["resources"] = list(resources)
    files = {**others, **resources, "kustomization.yaml": _HEADER + _dump(kustomization)}
    for name in _written_before(folder) - set(files):  # of another kind
        (folder / name).unlink(missing_ok=True)
    for name, text in files.items():
        replace_file(folder / name, text)
    written = [folder / name for name in files]
    if "secretGenerator" in kustomization:
        written.append(_write_secret(folder / SECRET_FILE))
    return written


def _document(manifest: Manifest) -> str:
    if manifest["kind"] != "Secret":
        return _dump(manifest)
    filled = {**manifest, "stringData": dict.fromkeys(manifest["stringData"], PLACEHOLDER)}
    return (
        "# The nodes of the run know each other by this secret. Nothing starts until it is replaced, for example by\n"
        f'#   sed "s/{PLACEHOLDER}/$(openssl rand -hex 32)/" FILE | kubectl apply -f -\n' + _dump(filled)
    )


def _generator(manifest: Manifest) -> Manifest:
    """Pods refer to it by its name, which must not get kustomize's suffix."""
    meta = manifest["metadata"]
    where = {"namespace": meta["namespace"]} if "namespace" in meta else {}
    kind = {"type": manifest["type"]} if "type" in manifest else {}
    return {"name": meta["name"], **where, **kind, "options": {"disableNameSuffixHash": True, "labels": meta["labels"]}}


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserInputError(f"'{folder}' is a file.", fix="Name a folder that is empty or does not exist.")
    file = folder / "kustomization.yaml"
    if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith(_HEADER):
        raise UserInputError(
            f"'{folder}' holds a kustomization that shardtune did not write.",
            why="It would be overwritten.",
            fix="Name another folder, and refer to it under `resources` of that kustomization.",
        )
    taken = sorted(name for name in (CONFIG_FILE, ".gitignore") if (folder / name).exists())
    if taken and not file.exists():
        raise UserInputError(
            f"'{folder}' already holds {' and '.join(taken)}.",
            why="It would be overwritten.",
            fix="Name a folder that is empty or does not exist.",
        )


def _written_before(folder: Path) -> set[str]:
    """Objects of the kustomization that this folder holds, which is ours."""
    file = folder / "kustomization.yaml"
    found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name for name in found.get("resources", []) if "/" not in name}


def _write_secret(path: Path) -> Path:
    """Readable for its owner alone from the first byte on."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"{SECRET_KEY}={secrets.token_hex(32)}\n")
    return path


class _Dumper(yaml.SafeDumper):
    """Block style; texts of several lines (run.yaml) as they are; no anchors for what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _dump(manifest: Manifest) -> str:
    first = {key: manifest[key] for key in _FIRST_KEYS if key in manifest}
    ordered = {**first, **manifest}
    if isinstance(manifest.get("metadata"), dict):
        meta = manifest["metadata"]
        ordered["metadata"] = {**{key: meta[key] for key in _FIRST_KEYS if key in meta}, **meta}
    text: str = yaml.dump(ordered, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)
    return text
