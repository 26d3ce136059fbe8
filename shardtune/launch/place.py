"""Am I the launcher or one of the workers, and on which node? Read from the environment alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardtune.errors import UserInputError

_PORT = 29500  # where the master listens unless told otherwise, as torchrun does


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


@dataclass(frozen=True)
class Asked:
    """What the command line says about nodes; None = not said."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def read_place(environ: Mapping[str, str], asked: Asked = Asked()) -> Worker | Node:  # noqa: B008 - frozen
    """What the command line, and else the environment, makes of this process.

    - `LOCAL_RANK` with `RANK` and `WORLD_SIZE`: torchrun or accelerate started this worker.
    - `PET_NNODES`/`PET_NODE_RANK` (Kubeflow's TrainJob): this is a pod; it starts `PET_NPROC_PER_NODE` workers.
    - `--nnodes`: this machine is one of so many. What is not said with it is taken from the environment.
    - `SLURM_STEP_NUM_NODES` > 1 with one task per node (`srun --ntasks-per-node=1`): this is a node of the step. More
      tasks than nodes are refused.
    - `RANK` and `WORLD_SIZE` alone: a scheduler started one process per pod (PyTorchJob: RANK is the pod's index).
    - nothing: this machine is all there is.

    Raises:
        UserInputError: half of a setting is there, or a number is none.
    """
    if "LOCAL_RANK" in environ and "RANK" in environ and "WORLD_SIZE" in environ:
        return _worker(environ, _int(environ, "LOCAL_RANK"))
    if asked != Asked():
        return _asked_node(environ, asked)
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ or "PET_NPROC_PER_NODE" in environ:
        return _pet_node(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _worker(environ, 0)
    _refuse_several_slurm_tasks(environ)
    if _number("SLURM_STEP_NUM_NODES", environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        return _slurm_node(environ)
    # A container image may say WORLD_SIZE=1; more than that, alone, would train as many strangers.
    if "RANK" in environ and not {"WORLD_SIZE", "LOCAL_RANK"} & set(environ):
        raise _rank_without_world_size(environ)
    if "RANK" in environ or "LOCAL_RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        _require(environ, "RANK", "WORLD_SIZE", because="another rank variable is set")
    return Node()


def says_how_many_nodes(environ: Mapping[str, str], asked: Asked) -> bool:
    """Whether the number of nodes was given, by the command line or a scheduler, and not assumed to be one."""
    return asked.nnodes is not None or "PET_NNODES" in environ or "SLURM_STEP_NUM_NODES" in environ


def unused_master(environ: Mapping[str, str], asked: Asked) -> str | None:
    """A notice where a wrapper script exports the address of a master and this machine trains alone all the same."""
    address = environ.get("MASTER_ADDR", "")
    if address in ("", "localhost", "::1") or address.startswith("127.") or says_how_many_nodes(environ, asked):
        return None
    return (
        f"MASTER_ADDR ({address}) is not used: nothing says how many machines there are, so this one trains alone. "
        "For several: --nnodes N --node-rank R on each."
    )


def _rank_without_world_size(environ: Mapping[str, str]) -> UserInputError:
    taken = " and ".join(name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name in environ)
    return UserInputError(
        f"WORLD_SIZE is missing although RANK is {environ['RANK']}.",
        why="RANK with WORLD_SIZE makes this process one rank of another launcher. With --nnodes it is a machine that "
        "starts its own processes, and RANK is its number.",
        fix=f"Add --nnodes N, the number of machines ({taken} {'is' if taken == 'RANK' else 'are'} taken from the "
        "environment), or set WORLD_SIZE to the number of ranks. To train on this machine alone, unset RANK.",
    )


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
        master_port=_port("PET_MASTER_PORT", environ.get("PET_MASTER_PORT", str(_PORT) if count > 1 else "0")),
        nproc=None if nproc is None else "auto" if nproc in words else _number("PET_NPROC_PER_NODE", nproc),
    )


def _asked_node(environ: Mapping[str, str], asked: Asked) -> Node:
    """The command line wins; MASTER_ADDR, MASTER_PORT and the pod's number may come from a scheduler."""
    if asked.nnodes is None:
        raise UserInputError(
            "--node-rank, --master-addr and --master-port need --nnodes.",
            fix="Say how many nodes there are: --nnodes N.",
        )
    if asked.nnodes == 1:
        return Node()
    rank, address = asked.node_rank, asked.master_addr or environ.get("MASTER_ADDR", environ.get("PET_MASTER_ADDR"))
    for name in ("PET_NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "RANK"):
        rank = _int(environ, name) if rank is None and name in environ else rank
    if rank is None or address is None:
        raise UserInputError(
            f"--nnodes {asked.nnodes} needs {'--node-rank' if rank is None else '--master-addr'} too.",
            why="Every node has a number from 0, and all meet at the address of node 0.",
            fix=f"Add it: --nnodes {asked.nnodes} --node-rank R --master-addr HOST.",
        )
    _check_index("--node-rank", rank, "--nnodes", asked.nnodes)
    port = environ.get("MASTER_PORT", environ.get("PET_MASTER_PORT", str(_PORT)))
    return Node(
        nnodes=asked.nnodes,
        node_rank=rank,
        master_addr=address,
        master_port=asked.master_port if asked.master_port is not None else _port("MASTER_PORT", port),
    )


def _slurm_node(environ: Mapping[str, str]) -> Node:
    """One task per node: srun numbers them, and the first host of the step is the master."""
    _require(environ, "SLURM_NODEID", "SLURM_STEP_NODELIST", because="SLURM_STEP_NUM_NODES is more than 1")
    return Node(
        nnodes=_int(environ, "SLURM_STEP_NUM_NODES"),
        node_rank=_int(environ, "SLURM_NODEID"),
        master_addr=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=_port("MASTER_PORT", environ.get("MASTER_PORT", str(_PORT))),
    )


def _refuse_several_slurm_tasks(environ: Mapping[str, str]) -> None:
    """Every task of a step would start a whole run. Only srun sets SLURM_STEP_NUM_TASKS: a batch script is one process,
    whatever `sbatch --ntasks` says, and so is the shell of `salloc`."""
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return
    tasks = _int(environ, "SLURM_STEP_NUM_TASKS")
    nodes = _number("SLURM_STEP_NUM_NODES", environ.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks <= nodes:
        return
    task = environ.get("SLURM_PROCID", "0")
    if task != "0":
        raise UserInputError(f"Task {task} of {tasks} is not started; task 0 says why.")
    raise UserInputError(
        f"srun has started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}.",
        why="shardtune starts the processes of a node itself, one per GPU; every task would start a run of its own.",
        fix="Use srun --ntasks-per-node=1 (with --nproc N for another number of processes than GPUs). In a shell that "
        "such a step runs (srun --pty), pass --nnodes 1.",
    )


def first_host(nodelist: str) -> str:
    """`a[03-05,9],b` → `a03`: the first host of SLURM's shortened list."""
    prefix, bracket, rest = nodelist.partition("[")
    if "," in prefix or not bracket:
        return prefix.split(",")[0]
    inside, _, after = rest.partition("]")
    return prefix + inside.split(",")[0].split("-")[0] + after.split(",")[0]


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


def _port(name: str, text: str) -> int:
    port = _number(name, text)
    if not 0 <= port <= 65535:
        raise UserInputError(f"{name} is {port}, not a port.", fix="Set it to a number from 1 to 65535.")
    return port


def _check_index(name: str, index: int, of_name: str, count: int) -> None:
    """Processes that number themselves wrongly wait for each other until the timeout."""
    if not 0 <= index < count:
        raise UserInputError(
            f"The numbers do not fit: {name} is {index}, {of_name} is {count}.",
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
