"""What is the job? One description, the same for every scheduler, made from a run's config once and for all.

Renderers only translate it: everything that is decided (name, command, environment, grace period) is decided here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from shardtune.cluster.quantity import mebibytes, parse_quantity
from shardtune.config import render_yaml
from shardtune.config.cluster_schema import ClusterSection
from shardtune.config.script_config import is_script_setting
from shardtune.errors import UserInputError
from shardtune.launch.process_role import NODES_VARIABLE
from shardtune.run.stop_request import GRACE_VARIABLE

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.plan.report import Plan
    from shardtune.script.command import ScriptCommand

CONFIG_FOLDER = "/etc/shardtune"
CONFIG_FILE = "run.yaml"
MASTER_PORT = 29500
NAME_CHARACTERS = 40  # controllers append to it: `-worker-12`, `-node-0-12-x7k2p`, and names of pods end at 63
_LEAST_GRACE = 120
WRITE_RATE = 200e6  # bytes a second that a network volume takes when it is busy
_LEAST_SHARED, _SHARED_PER_GPU = 2**30, 8 * 2**30


@dataclass(frozen=True)
class ClusterJob:
    """A job before it is rendered.

    Attributes:
        name: Of the job, of its Secret and ConfigMap, and the id of its run: a DNS label.
        settings: The section `cluster`, with its profile.
        nproc: Processes of each node.
        command: The container's main process, as argv; never a shell string.
        env: All plain variables: the user's, and ours where the user set none.
        reasons: Why we set what we set, by variable.
        config: The run.yaml that the pods read; None with a command of the user's own (`cluster.command`).
        grace_seconds: From SIGTERM to SIGKILL.
        shared_memory: Bytes of /dev/shm.
        output_dir: Where the run writes, in the container; None with a command of the user's own.
        script: What the job runs instead of the training.
    """

    name: str
    settings: ClusterSection
    nproc: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    grace_seconds: int = _LEAST_GRACE
    shared_memory: int = _LEAST_SHARED
    output_dir: PurePosixPath | None = None
    script: ScriptCommand | None = None

    @property
    def nodes(self) -> int:
        return self.settings.nodes

    @property
    def secret_name(self) -> str:
        """Of the Secret with the nodes' shared secret, which is made with the job and belongs to it."""
        return f"{self.name}-nodes"

    @property
    def config_name(self) -> str:
        """Of the ConfigMap with run.yaml, likewise."""
        return f"{self.name}-config"


def make_job(
    resolved: ResolvedConfig, file: Path | None, plan: Plan | None = None, script: ScriptCommand | None = None
) -> ClusterJob:
    """The job that a config describes.

    Args:
        file: The config file, whose name the job gets unless `cluster.job_name` gives one. A script's job gets that of
            the script, and may have no file.
        plan: What the run needs, where that is known: sizes /dev/shm and the grace period.

    Raises:
        UserInputError: a name that cannot be one.
    """
    settings = resolved.config.cluster
    name = settings.job_name or _generated_name(_named_after(file, script))
    check_name(name)
    grace = _grace_seconds(resolved, plan)
    env, reasons = _environment(settings, grace)
    own = tuple(settings.command)
    return ClusterJob(
        name=name,
        settings=settings,
        nproc=_processes(resolved),
        command=own or _command(name, script),
        env=env,
        reasons=reasons,
        config=None if own else pod_config(resolved, of_script=script is not None),
        grace_seconds=grace,
        shared_memory=_shared_memory(settings, plan),
        output_dir=None if own else PurePosixPath(settings.working_dir or "/") / resolved.config.train.output_dir,
        script=script,
    )


def _command(name: str, script: ScriptCommand | None) -> tuple[str, ...]:
    """The job's name is the name of its run: pods that are started again continue in the same folder."""
    config = f"{CONFIG_FOLDER}/{CONFIG_FILE}"
    if script is None:
        return ("shardtune", "train", config, "--run-id", name)
    return ("shardtune", "run", "--config", config, "--name", name, "--", *script.words)


def check_name(name: str) -> None:
    """Raise if Kubernetes would refuse the job's name, or those of its pods."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > NAME_CHARACTERS:
        raise UserInputError(
            f"'{name}' cannot be the name of a job.",
            why=f"Names of pods are made from it: at most {NAME_CHARACTERS} lower-case letters, digits and dashes, "
            "beginning with a letter.",
            fix="Set cluster.job_name (or --name).",
        )


def pod_config(resolved: ResolvedConfig, *, of_script: bool = False) -> str:
    """The run.yaml of the pods: every setting, so that an image with other defaults trains the same; references such
    as ${HF_TOKEN} as they were written; of `cluster` only the number of nodes. What accelerate's file said is in it.

    Args:
        of_script: Only the settings of a script's run.
    """

    def keep(path: str) -> bool:
        if of_script and not is_script_setting(path):
            return False
        return path == "cluster.nodes" or not path.startswith(("cluster.", "parallel.accelerate_config"))

    if resolved.config.cluster.gpus_per_node:  # a pod that sees fewer GPUs, or none, fails
        resolved = resolved.with_auto("parallel.nproc", _processes(resolved), "cluster.gpus_per_node")
        resolved = resolved.with_auto("parallel.device", "cuda", "cluster.gpus_per_node")

    return render_yaml(resolved, origins=False, keep=keep)


def _named_after(file: Path | None, script: ScriptCommand | None) -> str:
    if script is not None:
        return script.target if script.is_module else Path(script.target).stem
    assert file is not None, "a training has a config file"
    return file.stem


def _generated_name(text: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[: NAME_CHARACTERS - 5].strip("-")
    return f"{stem if stem[:1].isalpha() else f'run-{stem}'.strip('-')}-{secrets.token_hex(2)}"


def _processes(resolved: ResolvedConfig) -> int:
    nproc, gpus = resolved.config.parallel.nproc, resolved.config.cluster.gpus_per_node
    if nproc != "auto":
        return int(nproc)
    return max(1, gpus or 0)


def _environment(settings: ClusterSection, grace: int) -> tuple[dict[str, str], dict[str, str]]:
    """The user's variables, and ours beside them with the reason of each."""
    ours = {
        NODES_VARIABLE: (str(settings.nodes), "a pod that is told of fewer nodes fails instead of training alone"),
        GRACE_VARIABLE: (str(grace), "the run warns if a step and a save take longer"),
        "PYTHONUNBUFFERED": ("1", "lines reach the log when they are printed"),
    }
    if settings.rdma != "none":
        ours["NCCL_NET"] = ("IB", "RDMA was asked for: a fall-back to TCP is an error, not a slow run")
    if settings.pip_index_url:
        for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
            ours[name] = (settings.pip_index_url, "cluster.pip_index_url")
    taken = {*settings.env, *settings.secret_env}
    added = {name: pair for name, pair in ours.items() if name not in taken}
    values = {name: value for name, (value, _) in added.items()}
    return {**settings.env, **values}, {name: why for name, (_, why) in added.items()}


def _grace_seconds(resolved: ResolvedConfig, plan: Plan | None) -> int:
    """Time for the step that a SIGTERM interrupts and for the save behind it, half as long again."""
    asked = resolved.config.cluster.grace_seconds
    if asked != "auto":
        return asked
    if plan is None:
        return 5 * _LEAST_GRACE
    needed = plan.time.seconds + plan.host.checkpoint / WRITE_RATE
    return max(_LEAST_GRACE, int(1.5 * needed + 30))


def _shared_memory(settings: ClusterSection, plan: Plan | None) -> int:
    """Bytes of /dev/shm. A size that is none is for lint to report."""
    if settings.shared_memory != "auto":
        try:
            return int(parse_quantity(settings.shared_memory))
        except ValueError:
            return 0
    wanted = plan.host.shm if plan is not None else _SHARED_PER_GPU * max(1, settings.gpus_per_node or 0)
    try:
        half = int(parse_quantity(settings.memory or "")) // 2
    except ValueError:
        half = wanted
    return max(_LEAST_SHARED, min(wanted, half))


def shared_memory_quantity(job: ClusterJob) -> str:
    """As the user wrote it, or as it was computed."""
    return job.settings.shared_memory if job.settings.shared_memory != "auto" else mebibytes(job.shared_memory)
