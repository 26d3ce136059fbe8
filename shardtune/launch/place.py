"""Am I the launcher or one of the workers, and on which node? Read from the environment alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardtune.errors import UserInputError


@dataclass(frozen=True)
class Worker:
    """One process of a run that something else started: torchrun, accelerate, a scheduler, or our own launcher."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Node:
    """A machine that has to start its own processes. `nproc` None leaves the number to the config."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    nproc: int | Literal["auto"] | None = None


def read_place(environ: Mapping[str, str]) -> Worker | Node:
    """What the environment makes of this process.

    - `LOCAL_RANK` with `RANK` and `WORLD_SIZE`: torchrun or accelerate started this worker.
    - `PET_NNODES`/`PET_NODE_RANK` (Kubeflow's TrainJob): this is a pod; it starts `PET_NPROC_PER_NODE` workers.
    - `RANK` and `WORLD_SIZE` alone: a scheduler started one process per pod (PyTorchJob: RANK is the pod's index).
    - nothing: this machine is all there is.

    Raises:
        UserInputError: half of a setting is there, or a number is none.
    """
    if "LOCAL_RANK" in environ and "RANK" in environ and "WORLD_SIZE" in environ:
        return _worker(environ, _int(environ, "LOCAL_RANK"))
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ or "PET_NPROC_PER_NODE" in environ:
        return _pet_node(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _worker(environ, 0)
    # A container image may say WORLD_SIZE=1; more than that, alone, would train as many strangers.
    if "RANK" in environ or "LOCAL_RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        _require(environ, "RANK", "WORLD_SIZE", because="another rank variable is set")
    return Node()


def _worker(environ: Mapping[str, str], local_rank: int) -> Worker:
    rank, world_size = _int(environ, "RANK"), _int(environ, "WORLD_SIZE")
    _check_index("RANK", rank, "WORLD_SIZE", world_size)
    if world_size > 1:
        _require(environ, "MASTER_ADDR", "MASTER_PORT", because="RANK and WORLD_SIZE are set")
    return Worker(rank, world_size, local_rank)


def _pet_node(environ: Mapping[str, str]) -> Node:
    nnodes = environ.get("PET_NNODES", "1")
    if ":" in nnodes:
        low, high = nnodes.split(":", 1)
        if low != high:
            raise UserInputError(
                f"PET_NNODES is {nnodes}: a changing number of nodes is not supported.",
                fix="Set it to one number.",
            )
        nnodes = low
    nproc = environ.get("PET_NPROC_PER_NODE")
    words = {"auto", "gpu", "cpu"}
    count = _number("PET_NNODES", nnodes)
    if count > 1:
        _require(environ, "PET_NODE_RANK", "PET_MASTER_ADDR", because=f"PET_NNODES is {nnodes}")
    node_rank = _number("PET_NODE_RANK", environ.get("PET_NODE_RANK", "0"))
    _check_index("PET_NODE_RANK", node_rank, "PET_NNODES", count)
    if nproc is not None and nproc not in words and _number("PET_NPROC_PER_NODE", nproc) < 1:
        raise UserInputError(
            f"PET_NPROC_PER_NODE is {nproc}: a node without a process trains nothing.", fix="Set it to 1 or more."
        )
    return Node(
        nnodes=count,
        node_rank=node_rank,
        master_addr=environ.get("PET_MASTER_ADDR", "127.0.0.1"),
        master_port=_number("PET_MASTER_PORT", environ.get("PET_MASTER_PORT", "29500" if count > 1 else "0")),
        nproc=None if nproc is None else "auto" if nproc in words else _number("PET_NPROC_PER_NODE", nproc),
    )


def _int(environ: Mapping[str, str], name: str) -> int:
    return _number(name, environ[name])


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserInputError(
            f"The environment variable {name} is '{text}', not a whole number.",
            fix="Unset it, or let the scheduler set it.",
        ) from None


def _check_index(name: str, index: int, of_name: str, count: int) -> None:
    """Processes that number themselves wrongly wait for each other until the timeout."""
    if not 0 <= index < count:
        raise UserInputError(
            f"The environment variables do not fit: {name} is {index}, {of_name} is {count}.",
            why=f"{name} counts from 0 to {of_name} - 1.",
            fix="Let the scheduler set both, or unset them to run here alone.",
        )


def _require(environ: Mapping[str, str], *names: str, because: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserInputError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing although {because}.",
            why="A worker needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a pod the PET_* ones.",
            fix="Start through torchrun, accelerate launch or the scheduler, or unset the others to run here alone.",
        )
