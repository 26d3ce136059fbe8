"""How does one container of the job run on this machine? A smoke test of the very image, with docker or podman."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

from shardtune.cluster.quantity import parse_quantity
from shardtune.cluster.spec import CONFIG_FILE, CONFIG_FOLDER, ClusterJob, shared_memory_quantity
from shardtune.cluster.unsupported import refuse_settings, settings_in_use
from shardtune.errors import UserInputError

Engine = Literal["docker", "podman"]

_REFUSED = {
    "gpu_resource": "remove it; only NVIDIA's GPUs are passed to a container here",
    "env_from_secrets": "name each variable in cluster.secret_env; its value comes from this environment",
    "fs_group": "use cluster.run_as_gid",
    "pod_overlay": "remove it",
}
# What places a pod in a cluster, or names something there: one container on this machine has no use for it.
_OF_A_CLUSTER = (
    "namespace", "image_pull_secrets", "ephemeral_storage", "extended_resources", "networks", "annotations",
    "service_account", "node_selector", "tolerations", "affinity", "topology_spread", "topology", "priority_class",
    "queue", "gang_scheduling", "scheduler_name", "restarts", "max_hours", "keep_hours", "init_doctor",
)  # fmt: skip
_PULL = {"Always": "always", "IfNotPresent": "missing", "Never": "never"}


@dataclass(frozen=True)
class ContainerRun:
    """A command for this machine.

    Attributes:
        argv: `docker run …` or `podman run …`.
        left_out: Settings that mean nothing here; they are named to the user.
    """

    argv: tuple[str, ...]
    left_out: tuple[str, ...]


def render_container(
    job: ClusterJob, engine: Engine, folders: Mapping[str, Path], config_file: Path | None = None
) -> ContainerRun:
    """The job's container on this machine.

    Args:
        folders: By claim of `cluster.volumes`, the local folder that stands for it (--volume CLAIM=FOLDER).
        config_file: Where the job's run.yaml was written, to be mounted; needed unless the job has its own command.

    Raises:
        UserInputError: several nodes, a claim without a folder, or a setting that a container cannot have.
    """
    settings = job.settings
    if job.nodes > 1:
        raise UserInputError(
            f"cluster.nodes is {job.nodes}; {engine} runs one container.",
            fix="Add -o cluster.nodes=1, or use --to local-pods, which runs several on this machine.",
        )
    refuse_settings(job, engine.capitalize(), _REFUSED)
    if not settings.image:
        raise UserInputError("cluster.image is not set.", fix="Set the container image of the job.")
    words = [engine, "run", "--rm", "--name", job.name]
    for flag, value in _flags(job, engine):
        words += [flag, value]
    words += _mounts(job, folders, config_file)
    for name, value in job.env.items():
        words += ["--env", f"{name}={value}"]
    for name in settings.secret_env:
        words += ["--env", name]  # without a value: the caller's own is passed, and appears in no argument
    # As in a pod, the command replaces the image's entry point and is the main process.
    program, *arguments = job.command
    words += ["--entrypoint", program, settings.image, *arguments]
    return ContainerRun(tuple(words), tuple(settings_in_use(settings, _OF_A_CLUSTER)))


def check_secrets(job: ClusterJob, environ: Mapping[str, str]) -> None:
    """Raise if a variable of `cluster.secret_env` is not in this environment."""
    if missing := [name for name in job.settings.secret_env if not environ.get(name)]:
        raise UserInputError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in this environment.",
            why="cluster.secret_env names Secrets of a cluster; here their values come from the environment.",
            fix=f"Export {'it' if len(missing) == 1 else 'them'} first, or remove it from cluster.secret_env.",
        )


def _flags(job: ClusterJob, engine: Engine) -> Iterator[tuple[str, str]]:
    settings = job.settings
    if settings.gpus_per_node:
        yield from _gpus(settings.gpus_per_node, engine)
    yield "--shm-size", str(_bytes("shared_memory", shared_memory_quantity(job)))
    if memory := settings.memory_limit or settings.memory:
        yield "--memory", str(_bytes("memory", memory))
    if cores := settings.cpu_limit or settings.cpu:
        yield "--cpus", format(_quantity("cpu", cores).normalize(), "f")
    if settings.rdma != "none":
        yield "--device", "/dev/infiniband"
        yield "--ulimit", "memlock=-1:-1"  # RDMA registers memory: NCCL falls back to TCP without
        yield "--network", "host"
    for capability in settings.capabilities:
        yield "--cap-add", capability
    if settings.run_as_uid is not None or settings.run_as_gid is not None:
        uid, gid = settings.run_as_uid, settings.run_as_gid
        yield "--user", f"{'' if uid is None else uid}{'' if gid is None else f':{gid}'}"
    if settings.working_dir:
        yield "--workdir", settings.working_dir
    if settings.image_pull_policy:
        yield "--pull", _PULL[settings.image_pull_policy]
    for name, value in settings.labels.items():
        yield "--label", f"{name}={value}"
    yield "--stop-timeout", str(job.grace_seconds)


def _gpus(number: int, engine: Engine) -> Iterator[tuple[str, str]]:
    if engine == "docker":
        yield "--gpus", str(number)
        return
    for index in range(number):  # CDI devices, as podman knows GPUs
        yield "--device", f"nvidia.com/gpu={index}"
    yield "--security-opt", "label=disable"  # SELinux keeps containers from the GPUs' device files otherwise


def _mounts(job: ClusterJob, folders: Mapping[str, Path], config_file: Path | None) -> list[str]:
    claims = {volume.claim for volume in job.settings.volumes}
    if missing := sorted(claims - set(folders)):
        raise UserInputError(
            f"No folder on this machine stands for the claim{'s' if len(missing) > 1 else ''} {', '.join(missing)}.",
            why="cluster.volumes names PersistentVolumeClaims of a cluster; a container here mounts folders.",
            fix="Add " + " ".join(f"--volume {claim}=FOLDER" for claim in missing) + ".",
        )
    if unknown := sorted(set(folders) - claims):
        known = ", ".join(sorted(claims)) or "none"
        raise UserInputError(
            f"--volume names {', '.join(unknown)}, which is no claim of the job.", fix=f"cluster.volumes has: {known}."
        )
    words: list[str] = []
    for volume in job.settings.volumes:
        source = folders[volume.claim].resolve() / (volume.sub_path or "")
        if not source.is_dir():
            raise UserInputError(
                f"The folder '{source}' for the claim {volume.claim} does not exist.", fix="Create it, or name another."
            )
        words += ["--mount", _bind(source, volume.path, volume.read_only)]
    if job.config is not None:
        assert config_file is not None, "a job with a config needs its file"
        words += ["--mount", _bind(config_file.resolve(), f"{CONFIG_FOLDER}/{CONFIG_FILE}", True)]
    return words


def _bind(source: Path, target: str, read_only: bool) -> str:
    if "," in f"{source}{target}":
        raise UserInputError(
            f"'{source}' or '{target}' has a comma, which separates the parts of a mount.", fix="Use another folder."
        )
    return f"type=bind,source={source},target={target}" + (",readonly" if read_only else "")


def _quantity(name: str, text: str) -> Decimal:
    try:
        return parse_quantity(text)
    except ValueError:
        raise UserInputError(
            f"cluster.{name} is '{text}', which is not a quantity.", fix="Write 16 for cores, 256Gi for memory."
        ) from None


def _bytes(name: str, text: str) -> int:
    return int(_quantity(name, text))
