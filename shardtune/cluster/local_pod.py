"""What does a pod become on this machine? Its volumes are folders, its image is this Python, its secrets are files.

What cannot be had here is refused, with what to change.
"""

from __future__ import annotations

import os
import re
import secrets as random_secrets
import shutil
import site
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from shardtune.cluster.manifests import Manifest, Manifests
from shardtune.cluster.pod_plan import PodPlan, expand_references, stored_values
from shardtune.cluster.pod_process import KNOWN_CAPABILITIES, SUBNET
from shardtune.cluster.quantity import parse_quantity
from shardtune.errors import ShardtuneError, UserInputError

BIN = "/opt/shardtune/bin"  # of the image stand-in: the command `shardtune`
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
Stored = dict[tuple[str, str], dict[str, str]]


@dataclass(frozen=True)
class Mount:
    path: str
    source: Path
    read_only: bool


@dataclass(frozen=True)
class LocalContainer:
    """A command as a kubelet would start it. `folder` is its working directory."""

    name: str
    command: list[str]
    env: dict[str, str]
    folder: str
    mounts: tuple[Mount, ...]
    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: tuple[str, ...]
    no_new_privileges: bool


@dataclass(frozen=True)
class LocalPod:
    """A pod of this machine.

    Attributes:
        containers: The init containers first.
        skipped: Init containers of another image, by name.
        memory_volumes: Bytes of the volumes that are memory, by folder; None = no limit.
        memory, cpus, disk: Limits; None = none.
        names: By which other pods reach it.
    """

    name: str
    hostname: str
    node_rank: int
    address: str
    containers: tuple[LocalContainer, ...]
    skipped: tuple[str, ...]
    memory_volumes: Mapping[str, int | None]
    memory: int | None
    cpus: float | None
    disk: int | None
    grace_seconds: int
    names: tuple[str, ...]


@dataclass
class Volumes:
    """Where the volumes of all pods are.

    Attributes:
        claims: Folder of each PersistentVolumeClaim. Those that are missing are made under `work_folder`.
        scratch: For what ends with the job.
    """

    claims: dict[str, Path]
    work_folder: Path
    scratch: Path
    stored: Stored = field(default_factory=dict)

    def source(self, plan: PodPlan, name: str, volume: Manifest, memory: dict[str, int | None]) -> Path:
        """The folder of a pod's volume."""
        folder = self.scratch / plan.hostname / "volumes" / name
        if "persistentVolumeClaim" in volume:
            return self.claim(str(volume["persistentVolumeClaim"]["claimName"]))
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            folder.chmod(0o777)
            if volume["emptyDir"].get("medium") == "Memory":
                limit = volume["emptyDir"].get("sizeLimit")
                memory[str(folder)] = int(parse_quantity(str(limit))) if limit is not None else None
            return folder
        for kind, key, reference in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            if key in volume and not {"items"} & set(volume[key]):
                values = self.stored.get((kind, volume[key][reference]))
                if values is None:
                    raise _missing(f"The {kind} '{volume[key][reference]}' of {plan.name} is not part of the job.")
                for file, text in values.items():
                    (folder / file).write_text(text, encoding="utf-8")
                return folder
        raise UserInputError(
            f"local-pods cannot provide the volume '{name}' ({', '.join(volume)}) of {plan.name}.",
            why="It provides PersistentVolumeClaims, ConfigMaps and Secrets (whole), and emptyDir.",
            fix="Leave it out of cluster.pod_overlay for local-pods.",
        )

    def claim(self, name: str) -> Path:
        if name not in self.claims:
            self.claims[name] = self.work_folder / "claims" / name
            self.claims[name].mkdir(parents=True, exist_ok=True)
        return self.claims[name]


def local_pods(
    plans: Sequence[PodPlan], manifests: Manifests, volumes: Volumes, secrets: Path | None
) -> list[LocalPod]:
    """The pods as they are started here.

    Args:
        secrets: A folder with the Secrets that the job refers to, as files `SECRET/KEY`.

    Raises:
        UserInputError: something that this machine cannot give them.
    """
    volumes.stored = {**_secrets_of(secrets), **_filled(stored_values(manifests))}
    gpus = _gpus(plans)
    return [_local_pod(plan, volumes, gpus.get(plan.node_rank)) for plan in plans]


def stand_in() -> list[str]:
    """Folders that stand for the image's Python: this one, with its packages."""
    package = Path(__file__).resolve().parents[1]
    found = [sys.prefix, sys.base_prefix, str(package), site.getusersitepackages(), *_added_folders()]
    found += [os.path.realpath(path) for path in found]
    kept: list[str] = []
    for path in sorted(dict.fromkeys(found), key=len):
        system = path.startswith(("/usr/", "/opt/", "/lib/", "/bin/", "/etc/"))
        inside = any(PurePosixPath(other) in PurePosixPath(path).parents for other in kept)
        if Path(path).is_dir() and not system and not inside and path not in ("/", "/usr"):
            kept.append(path)
    return kept


def stand_in_environment(home: str) -> dict[str, str]:
    """What an image with this Python would set."""
    package = Path(__file__).resolve().parents[1]
    found = {"PATH": f"{BIN}:{Path(sys.executable).parent}:{_PATH}", "HOME": home, "LANG": "C.UTF-8"}
    checkout = [] if Path(sys.prefix).resolve() in package.parents else [str(package.parent)]
    if folders := list(dict.fromkeys([*checkout, *_added_folders()])):
        found["PYTHONPATH"] = ":".join(folders)
    return found


def _added_folders() -> list[str]:
    """Packages that PYTHONPATH adds to this Python."""
    added = os.environ.get("PYTHONPATH", "").split(":")
    return [str(Path(folder).absolute()) for folder in added if folder and Path(folder).is_dir()]


def write_stand_in(folder: Path) -> Path:
    """The command `shardtune` of this Python, for the search path. It becomes the process that the shell was."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "shardtune"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardtune "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return folder


def _local_pod(plan: PodPlan, volumes: Volumes, gpus: str | None) -> LocalPod:
    if len(plan.spec["containers"]) > 1:
        others = ", ".join(one["name"] for one in plan.spec["containers"][1:])
        raise UserInputError(
            f"{plan.name} has more containers than the one that trains ({others}); local-pods runs one.",
            fix="Leave them out of cluster.pod_overlay for local-pods.",
        )
    image = plan.container.get("image")
    ours = [one for one in plan.init_containers if one.get("image") == image]
    memory: dict[str, int | None] = {}
    containers = tuple(_container(plan, one, volumes, memory, gpus) for one in [*ours, plan.container])
    limits = plan.resources.get("limits", {})
    return LocalPod(
        name=plan.name,
        hostname=plan.hostname,
        node_rank=plan.node_rank,
        address=f"{SUBNET}.{plan.node_rank + 1}",
        containers=containers,
        skipped=tuple(one["name"] for one in plan.init_containers if one not in ours),
        memory_volumes=memory,
        memory=int(parse_quantity(str(limits["memory"]))) if "memory" in limits else None,
        cpus=float(parse_quantity(str(limits["cpu"]))) if "cpu" in limits else None,
        disk=int(parse_quantity(str(limits["ephemeral-storage"]))) if "ephemeral-storage" in limits else None,
        grace_seconds=plan.grace_seconds,
        names=plan.dns_names,
    )


def _container(
    plan: PodPlan, container: Manifest, volumes: Volumes, memory: dict[str, int | None], gpus: str | None
) -> LocalContainer:
    pod_context, context = plan.spec.get("securityContext", {}), container.get("securityContext", {})
    uid = int(context.get("runAsUser", pod_context.get("runAsUser", os.geteuid())))
    gid = int(context.get("runAsGroup", pod_context.get("runAsGroup", 0 if uid == 0 else os.getegid())))
    added = tuple(context.get("capabilities", {}).get("add", ()))
    if unknown := [name for name in added if name not in KNOWN_CAPABILITIES]:
        raise UserInputError(
            f"local-pods does not know the capability {', '.join(unknown)}.", fix="Remove it from cluster.capabilities."
        )
    try:
        env = plan.env(volumes.stored, container)
    except UserInputError:
        raise
    except ShardtuneError as error:
        raise _missing(error.what) from None
    words = [*container.get("command", []), *container.get("args", [])]
    if not container.get("command"):
        raise UserInputError(
            f"The container {container['name']} of {plan.name} has no command.",
            why="local-pods has no image whose own command it could run.",
            fix="Set cluster.command, or leave it to shardtune.",
        )
    given = {"HOSTNAME": plan.hostname, "KUBERNETES_SERVICE_HOST": f"{SUBNET}.254", "KUBERNETES_SERVICE_PORT": "443"}
    if gpus is not None:
        given["CUDA_VISIBLE_DEVICES"] = gpus
    return LocalContainer(
        name=container["name"],
        command=[expand_references(word, env) for word in words],
        env={**stand_in_environment("/root" if uid == 0 else "/"), **given, **env},
        folder=container.get("workingDir", "/"),
        mounts=tuple(_mounts(plan, container, volumes, memory)),
        uid=uid,
        gid=gid,
        groups=(int(pod_context["fsGroup"]),) if "fsGroup" in pod_context else (),
        capabilities=added,
        no_new_privileges=context.get("allowPrivilegeEscalation") is False,
    )


def _mounts(plan: PodPlan, container: Manifest, volumes: Volumes, memory: dict[str, int | None]) -> Iterable[Mount]:
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in plan.volumes:
            raise UserInputError(
                f"{plan.name} mounts '{mount['name']}' at {mount['mountPath']}, but has no such volume.",
                fix="Add it to cluster.pod_overlay, or remove the mount.",
            )
        volume = plan.volumes[mount["name"]]
        source = volumes.source(plan, mount["name"], volume, memory)
        if sub_path := mount.get("subPath"):
            source = source / sub_path
            source.mkdir(parents=True, exist_ok=True)
        read_only = mount.get("readOnly", False) or "configMap" in volume or "secret" in volume
        yield Mount(mount["mountPath"].rstrip("/"), source, read_only)


def _gpus(plans: Sequence[PodPlan]) -> dict[int, str]:
    """CUDA_VISIBLE_DEVICES of each node: GPUs of its own, as a device plugin would give it."""
    wanted: dict[int, int] = {}
    for plan in plans:
        amounts = {**plan.resources.get("requests", {}), **plan.resources.get("limits", {})}
        extended = {name: str(amount) for name, amount in amounts.items() if name not in _PLAIN_RESOURCES}
        wanted[plan.node_rank] = sum(int(parse_quantity(text)) for name, text in extended.items() if "gpu" in name)
        if others := [name for name in extended if "gpu" not in name]:
            raise UserInputError(
                f"local-pods cannot give {plan.name} the resource {', '.join(others)}.",
                why="Only a cluster's device plugin has it.",
                fix="Add -o cluster.extended_resources={} -o cluster.rdma=none.",
            )
    total, here = sum(wanted.values()), _visible_gpus()
    if total > len(here):
        raise UserInputError(
            f"The pods ask for {total} GPU{'s' if total > 1 else ''} together; this machine has {len(here)}.",
            fix="Add -o cluster.gpus_per_node=0 to run them on CPUs, or fewer nodes and GPUs.",
        )
    found, first = {}, 0
    for rank, number in wanted.items():
        if number:
            found[rank] = ",".join(here[first : first + number])
        first += number
    return found


def _visible_gpus() -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]


def _filled(stored: Stored) -> Stored:
    """Values of the job's own Secret are made when it is submitted: here, for these processes alone."""
    return {
        where: {
            key: value or (random_secrets.token_hex(32) if where[0] == "Secret" else "") for key, value in keys.items()
        }
        for where, keys in stored.items()
    }


def _secrets_of(folder: Path | None) -> Stored:
    if folder is None:
        return {}
    if not folder.is_dir():
        raise UserInputError(f"There is no folder '{folder}' with Secrets.", fix="Give a folder with files SECRET/KEY.")
    return {
        ("Secret", secret.name): {file.name: file.read_text(encoding="utf-8") for file in secret.iterdir()}
        for secret in folder.iterdir()
        if secret.is_dir()
    }


def _missing(what: str) -> UserInputError:
    return UserInputError(
        what,
        why="local-pods does not read the cluster's Secrets and ConfigMaps.",
        fix="Write its values to files SECRET/KEY in a folder and name it (--secrets FOLDER).",
    )


def replace_paths(text: str, places: Mapping[str, Path]) -> str:
    """Every mention of a mounted path by that of its folder here."""
    if not places:
        return text
    paths = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({paths})(?![\w.-])", lambda found: str(places[found[1]]), text)


def copy_with_paths(source: Path, target: Path, places: Mapping[str, Path]) -> None:
    """A ConfigMap whose files name paths here."""
    shutil.copytree(source, target)
    for file in target.iterdir():
        file.write_text(replace_paths(file.read_text(encoding="utf-8"), places), encoding="utf-8")


def as_json(pod: LocalPod, scratch: Path, files: Mapping[str, Path], cgroups: Sequence[Path]) -> dict[str, Any]:
    """For `pod_process`."""
    root = scratch / pod.hostname / "root"
    root.mkdir(parents=True, exist_ok=True)
    return {
        "hostname": pod.hostname, "address": pod.address, "root": str(root), "image": stand_in(),
        "disk": f",size={pod.disk}" if pod.disk is not None else "",
        "files": {path: str(source) for path, source in files.items()}, "cgroups": [str(path) for path in cgroups],
        "memory_volumes": {path: size if size is not None else "50%" for path, size in pod.memory_volumes.items()},
        "containers": [
            {
                "name": one.name, "command": one.command, "env": one.env, "folder": one.folder, "uid": one.uid,
                "gid": one.gid, "groups": list(one.groups), "add": list(one.capabilities),
                "no_new_privileges": one.no_new_privileges,
                "mounts": [
                    {"path": mount.path, "source": str(mount.source), "read_only": mount.read_only}
                    for mount in one.mounts
                ],
            }
            for one in pod.containers
        ],
    }  # fmt: skip
