"""Which checks are made? All of them for `shardtune doctor`, the quick ones before a run of several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shardtune.doctor import gpu, limits, memory, nccl_variables, network, storage, versions
from shardtune.doctor.finding import Finding, warn
from shardtune.doctor.job import Job
from shardtune.doctor.needs import plan_needs
from shardtune.doctor.system import System
from shardtune.errors import MachineError, UserInputError
from shardtune.launch.process_role import Node
from shardtune.run.stop_request import grace_seconds
from shardtune.terminal import fitted

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig

Check = Callable[[System, Job], Iterable[Finding]]

QUICK: tuple[Check, ...] = (
    versions.check_packages,
    versions.check_cuda,
    versions.check_torchvision,
    gpu.check_visible,
    gpu.check_health,
    gpu.check_nvlink,
    limits.check_memlock,
    limits.check_shm,
    memory.check_memory,
    network.check_rdma,
    network.check_interfaces,
    network.check_hca,
    nccl_variables.check_variables,
    storage.check_output,
)
# What takes seconds, what a start waits for or checks by itself, and what a run survives.
ALL: tuple[Check, ...] = (
    *QUICK,
    versions.check_model_class,
    memory.check_processes,
    gpu.check_persistence,
    gpu.check_xids,
    gpu.check_peer_access,
    network.check_master_name,
    storage.check_paths,
    storage.check_read_speed,
    storage.check_grace,
)


def make_checks(system: System, job: Job, checks: Iterable[Check] = ALL) -> list[Finding]:
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(system, job)
        except (OSError, ValueError) as error:  # a file that fails while it is read, or says something unheard of
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(warn(name, f"not checked: {error}", "See why it cannot be read."))
    return findings


def job_for(
    system: System, config: RunConfig | None, node: Node, nproc: int | str | None = None, grace: float | None = None
) -> Job:
    """The run that `config` describes on this node; without one, a run on every GPU that is visible.

    Args:
        nproc: Processes on this node; None and auto leave it to the config, and that to the number of GPUs.
        grace: Seconds between SIGTERM and SIGKILL; None leaves it to the config, the environment, and a usual value.
    """
    device = config.parallel.device if config is not None else "auto"
    if device == "auto":
        device = "cuda" if system.visible_gpus and system.torch_cuda else "cpu"
    asked = [nproc, config.parallel.nproc if config is not None else None, node.nproc]
    given = next((int(number) for number in asked if number not in (None, "auto")), None)
    grace = grace_seconds(grace or (config.train.grace_seconds if config is not None else None), system.environ)
    processes = given if given is not None else max(1, len(system.visible_gpus) if device == "cuda" else 1)
    return Job(config, node, processes, device, grace)


def preflight(asked: ResolvedConfig, node: Node, nproc: int, environ: Mapping[str, str]) -> None:
    """The quick checks, before the processes of a run are started.

    Raises:
        MachineError: a GPU is broken; another node may be fine.
        UserInputError: any other failed check.
    """
    system = System(environ=environ)
    job = job_for(system, asked.config, node, nproc)
    with suppress(UserInputError):  # the run refuses it in its own place
        job = replace(job, needs=plan_needs(asked, system, job))
    findings = make_checks(system, job, QUICK)
    for finding in findings:
        if finding.verdict == "warn":
            text = f"warning: {finding.check}: {finding.evidence}. {finding.fix}"
            print(fitted(text, sys.stderr), file=sys.stderr, flush=True)
    refuse_failed(findings)


def refuse_failed(findings: Iterable[Finding]) -> None:
    """Raises if a check has failed: `preflight` says what."""
    failed = [finding for finding in findings if finding.verdict == "fail"]
    if failed:
        kind = MachineError if failed[0].check.startswith("gpu.") else UserInputError
        first, *others = failed
        raise kind(
            f"This machine is not fit for the run: {first.evidence}.",
            why="; ".join(f"{finding.check}: {finding.evidence}" for finding in others),
            fix=f"{first.fix} (`shardtune doctor` shows all checks; --skip-preflight starts without them.)",
        )
