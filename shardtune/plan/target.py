"""Which machines is a plan for? Those that are named (`2xH200`, 4 nodes), or the one it runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError
from shardtune.machine import lacks_bf16, memory_limit, usable_cores
from shardtune.plan.catalogue import for_cores, load_catalogue
from shardtune.plan.facts import Machine
from shardtune.terminal import count

if TYPE_CHECKING:
    from shardtune.config.schema import ParallelSection
    from shardtune.plan.catalogue import Catalogue, Cluster


@dataclass(frozen=True)
class Target:
    """The machine as `resolve` sees it, and how fast it is."""

    machine: Machine
    cluster: Cluster


def target_of(
    parallel: ParallelSection,
    gpus_here: Sequence[Mapping[str, Any]],
    *,
    gpus: str = "",
    nodes: int = 1,
    link: str = "",
    catalogue: Path | None = None,
) -> Target:
    """Args:
        gpus_here: Name and memory of each GPU of this machine, for where none are named.
        gpus: How many of which GPU each node has; empty: what is here.
        link: Between nodes; empty: the catalogue's default.

    Raises:
        UserInputError: nobody knows the GPU, or the config asks for something else.
    """
    known = load_catalogue(catalogue)
    if gpus and parallel.device == "cpu":
        raise UserInputError(
            f"--gpus is {gpus}, but parallel.device is cpu.", fix="Set parallel.device: auto, or leave --gpus out."
        )
    if not gpus and (not gpus_here or parallel.device == "cpu"):
        return _on_cpu(parallel, known, nodes, link)
    host = 0  # of machines elsewhere nobody knows it
    if gpus:
        number, gpu = known.gpus_of(gpus)
        memory = gpu.memory
    else:
        number, gpu = len(gpus_here), known.gpu(str(gpus_here[0].get("name")))
        memory, host = min(int(one.get("memory", gpu.memory)) for one in gpus_here), memory_limit()
    ranks = _ranks(parallel, number, gpus or f"{number}x{gpu.name}")
    machine = Machine("cuda", memory, ranks, (ranks,) * nodes, gpu=gpu.name, host_memory=host)
    return Target(machine, known.cluster(gpu, machine.nodes, link))


def _ranks(parallel: ParallelSection, number: int, named: str) -> int:
    if parallel.nproc == "auto":
        return number
    if parallel.nproc > number:
        raise UserInputError(
            f"parallel.nproc is {parallel.nproc}, but a node has {count(number, 'GPU')} ({named}).",
            why="Each process has a GPU of its own.",
            fix=f"Set parallel.nproc: auto (-o parallel.nproc=auto), or --gpus with at least {parallel.nproc} GPUs.",
        )
    return parallel.nproc


def _on_cpu(parallel: ParallelSection, known: Catalogue, nodes: int, link: str) -> Target:
    ranks = 1 if parallel.nproc == "auto" else parallel.nproc
    machine = Machine(
        "cpu", memory_limit() // ranks, ranks, (ranks,) * nodes, host_memory=memory_limit(), lacks_bf16=lacks_bf16()
    )
    cores = max(1, usable_cores() // ranks)
    return Target(machine, known.cluster(for_cores(known.gpu("CPU"), cores), machine.nodes, link))
