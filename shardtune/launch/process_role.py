"""Is this process the launcher or a worker, and on which node? Read from the command line and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardtune.errors import UserInputError

NODES_VARIABLE = "SHARDTUNE_NODES"  # how many nodes the job was submitted with; `shardtune submit` sets it in every pod
_PORT = 29500  # the master's default port, as with torchrun
_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"  # every container of a pod has it
# What numbers the nodes of a job: Kubeflow's operators, an Indexed Job, PyTorchJob (RANK is the pod's index), Slurm.
_RANKS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK", "SLURM_NODEID")
_SCHEDULERS = {
    NODES_VARIABLE, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "GROUP_WORLD_SIZE",
    "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST",
}  # fmt: skip


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
class NodeOptions:
    """--nnodes, --node-rank, --master-addr and --master-port; None = not given."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def detect_role(environ: Mapping[str, str], options: NodeOptions = NodeOptions()) -> Worker | Node:  # noqa: B008 - frozen
    """The role of this process, from the command line, and otherwise from the environment.

    - `LOCAL_RANK` with `RANK` and `WORLD_SIZE`: torchrun or accelerate started this worker.
    - `SHARDTUNE_NODES` (`shardtune submit`): this is one of so many nodes. Its rank and master are what the scheduler
      gave: PyTorchJob, TrainJob, an Indexed Job or Slurm. A scheduler that gave another number is an error.
    - `PET_NNODES`/`PET_NODE_RANK` (Kubeflow's TrainJob): this is a pod; it starts `PET_NPROC_PER_NODE` workers.
    - `--nnodes`: this machine is one of N. What is not given with it is taken from the environment.
    - `SLURM_STEP_NUM_NODES` > 1 with one task per node (`srun --ntasks-per-node=1`): this is a node of the step. More
      tasks than nodes are refused.
    - `RANK` and `WORLD_SIZE` alone: a scheduler started one process per pod (PyTorchJob: RANK is the pod's index).
    - nothing: a single machine.

    Raises:
        UserInputError: a variable that belongs to another one is missing, contradicts it, or is not a number.
    """
    if "LOCAL_RANK" in environ and "RANK" in environ and "WORLD_SIZE" in environ:
        worker = _worker(environ, _int(environ, "LOCAL_RANK"))
        _check_other_launcher(environ, worker)
        return worker
    if options != NodeOptions():
        return _asked_node(environ, options)
    if NODES_VARIABLE in environ:
        return _submitted_node(environ)
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ or "PET_NPROC_PER_NODE" in environ:
        return _pet_node(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _worker(environ, 0)
    _refuse_several_slurm_tasks(environ)
    if _number("SLURM_STEP_NUM_NODES", environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        return _slurm_node(environ)
    # A container image may set WORLD_SIZE=1; more than that, alone, would start as many independent runs.
    if "RANK" in environ and not {"WORLD_SIZE", "LOCAL_RANK"} & set(environ):
        raise _rank_without_world_size(environ)
    if "RANK" in environ or "LOCAL_RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        _require(environ, "RANK", "WORLD_SIZE", because="another rank variable is set")
    return Node()


def says_how_many_nodes(environ: Mapping[str, str], options: NodeOptions) -> bool:
    """Whether the command line or a scheduler gave the number of nodes."""
    return options.nnodes is not None or any(
        name in environ for name in (NODES_VARIABLE, "PET_NNODES", "SLURM_STEP_NUM_NODES")
    )


def this_node_alone(environ: Mapping[str, str], nodes: int) -> Node:
    """This node as one of `nodes`, without a master: in an init container few schedulers say more."""
    if NODES_VARIABLE in environ:
        nodes = _submitted_nodes(environ)
    return Node(nnodes=nodes, master_addr="", nproc=_pet_nproc(environ))


def refuse_lone_pod(node: Node, nodes: int, environ: Mapping[str, str], options: NodeOptions) -> None:
    """Refuse a pod that would train alone although its config asks for several nodes.

    Args:
        nodes: `cluster.nodes` of the config.

    Raises:
        UserInputError: with what the scheduler gave.
    """
    if options.nnodes is None and _POD_VARIABLE in environ and node.nnodes == 1 < nodes:
        raise UserInputError(
            f"The config asks for {nodes} nodes (cluster.nodes), but this pod was given one.",
            why=_given(environ, "Each pod would train alone."),
            fix=f"{_expected(environ)} To train in this pod alone: --nnodes 1.",
        )


def unused_master(environ: Mapping[str, str], options: NodeOptions) -> str | None:
    """A notice where a wrapper script exports a master's address but this machine trains alone."""
    address = environ.get("MASTER_ADDR", "")
    if address in ("", "localhost", "::1") or address.startswith("127.") or says_how_many_nodes(environ, options):
        return None
    return (
        f"MASTER_ADDR ({address}) is ignored: the number of machines is not set, so this one trains alone. "
        "To train on several, pass --nnodes N --node-rank R on each."
    )


def _submitted_nodes(environ: Mapping[str, str]) -> int:
    nodes = _int(environ, NODES_VARIABLE)
    if nodes < 1:
        raise UserInputError(f"{NODES_VARIABLE} is {nodes}.", fix="Set it to the number of nodes, or unset it.")
    return nodes


def _submitted_node(environ: Mapping[str, str]) -> Node:
    nodes = _submitted_nodes(environ)
    _refuse_several_slurm_tasks(environ)
    _check_scheduler(environ, nodes)
    nproc = _pet_nproc(environ)
    if nodes == 1:
        return Node(nproc=nproc)
    rank = next((name for name in _RANKS if name in environ), None)
    prefix = "PET_" if environ.get("PET_MASTER_ADDR") else ""
    address = environ.get(f"{prefix}MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", ""))
    if rank is None or not address:
        missing = " or ".join(
            what
            for what, is_missing in (("which one", rank is None), ("where the master is", not address))
            if is_missing
        )
        raise UserInputError(
            f"The job was submitted with {nodes} nodes, but nothing tells this one {missing}.",
            why=_given(environ, "It would train alone, and so would the others."),
            fix=_expected(environ),
        )
    _check_index(rank, _int(environ, rank), NODES_VARIABLE, nodes)
    port = f"{prefix}MASTER_PORT"
    return Node(nodes, _int(environ, rank), address, _port(port, environ.get(port, str(_PORT))), nproc)


def _check_scheduler(environ: Mapping[str, str], nodes: int) -> None:
    """What the scheduler says of the number of nodes must be what the job was submitted with."""
    given: dict[str, int] = {}
    if "PET_NNODES" in environ:
        given["PET_NNODES"] = _pet_nnodes(environ)
    elif "SLURM_STEP_NUM_NODES" in environ:
        given["SLURM_STEP_NUM_NODES"] = _int(environ, "SLURM_STEP_NUM_NODES")
    for name, number in given.items():
        if number != nodes:
            raise _other_number(environ, nodes, f"{name} is {number}")
    # PyTorchJob: pods, or pods times processes. An image may set WORLD_SIZE alone.
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world_size = _int(environ, "WORLD_SIZE")
        if world_size < nodes or world_size % nodes:
            raise _other_number(environ, nodes, f"WORLD_SIZE is {world_size}")


def _check_other_launcher(environ: Mapping[str, str], worker: Worker) -> None:
    """torchrun in a pod that was given no PET_* starts a world of its own."""
    if NODES_VARIABLE not in environ:
        return
    nodes = _submitted_nodes(environ)
    launched = _number("GROUP_WORLD_SIZE", environ.get("GROUP_WORLD_SIZE", str(nodes)))
    if launched != nodes or worker.world_size < nodes:
        started = f"{launched} node{'s' if launched > 1 else ''} with {worker.world_size} rank"
        raise _other_number(environ, nodes, f"its launcher started {started}{'s' if worker.world_size > 1 else ''}")


def _other_number(environ: Mapping[str, str], nodes: int, other: str) -> UserInputError:
    return UserInputError(
        f"The job was submitted with {nodes} node{'s' if nodes > 1 else ''} ({NODES_VARIABLE}), but {other}.",
        why=_given(environ, "Nodes that count differently wait for each other, or train alone."),
        fix="Change cluster.nodes and submit again: numNodes, replicas or parallelism of the job alone is not enough. "
        + (_expected(environ) if nodes > 1 else ""),
    )


def _given(environ: Mapping[str, str], consequence: str) -> str:
    names = sorted(name for name in environ if name in _SCHEDULERS or name.startswith("PET_"))
    shown = ", ".join(f"{name}={environ[name]}" for name in names)
    return f"The scheduler set {shown or 'no variable that says more'}. {consequence}"


def _expected(environ: Mapping[str, str]) -> str:
    """What is probably wrong with the job's manifest."""
    if "SLURM_JOB_ID" in environ:
        return "Start the command with srun --ntasks-per-node=1 inside the batch script."
    if any(name.startswith("PET_") for name in environ) or "RANK" in environ:
        return "See the number of replicas (PyTorchJob) or numNodes (TrainJob) in the cluster: `kubectl get … -o yaml`."
    return (
        "A TrainJob gives PET_* only if its runtime has mlPolicy.torch and the TrainJob itself has spec.trainer "
        "(`trainer: {}` is enough). A PyTorchJob gives them to the container called `pytorch`. A JobSet or Job needs "
        "completionMode: Indexed, and MASTER_ADDR in the pod's env. `shardtune submit` writes all of this."
    )


def _rank_without_world_size(environ: Mapping[str, str]) -> UserInputError:
    used = " and ".join(name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name in environ)
    return UserInputError(
        f"RANK is {environ['RANK']}, but WORLD_SIZE is not set.",
        why="RANK with WORLD_SIZE makes this process one rank of another launcher. With --nnodes it is a node that "
        "starts its own processes, and RANK is its node rank.",
        fix=f"Add --nnodes N, the number of machines ({used} {'is' if used == 'RANK' else 'are'} read from the "
        "environment), or set WORLD_SIZE to the number of ranks. To train on this machine alone, unset RANK.",
    )


def _worker(environ: Mapping[str, str], local_rank: int) -> Worker:
    rank, world_size = _int(environ, "RANK"), _int(environ, "WORLD_SIZE")
    _check_index("RANK", rank, "WORLD_SIZE", world_size)
    if world_size > 1:
        _require(environ, "MASTER_ADDR", "MASTER_PORT", because="RANK and WORLD_SIZE are set")
    return Worker(rank, world_size, local_rank)


def _pet_nnodes(environ: Mapping[str, str]) -> int:
    nnodes = environ.get("PET_NNODES", "1")
    if ":" in nnodes:
        low, high = nnodes.split(":", 1)
        if low != high:
            raise UserInputError(
                f"PET_NNODES is {nnodes}: an elastic number of nodes is not supported.",
                fix="Set it to a single number.",
            )
        nnodes = low
    return _number("PET_NNODES", nnodes)


def _pet_nproc(environ: Mapping[str, str]) -> int | Literal["auto"] | None:
    text = environ.get("PET_NPROC_PER_NODE")
    if text is None or text in ("auto", "gpu", "cpu"):
        return None if text is None else "auto"
    nproc = _number("PET_NPROC_PER_NODE", text)
    if nproc < 1:
        raise UserInputError(
            f"PET_NPROC_PER_NODE is {nproc}; every node needs at least one process.", fix="Set it to 1 or more."
        )
    return nproc


def _pet_node(environ: Mapping[str, str]) -> Node:
    count = _pet_nnodes(environ)
    if count > 1:
        _require(environ, "PET_NODE_RANK", "PET_MASTER_ADDR", because=f"PET_NNODES is {count}")
    node_rank = _number("PET_NODE_RANK", environ.get("PET_NODE_RANK", "0"))
    _check_index("PET_NODE_RANK", node_rank, "PET_NNODES", count)
    return Node(
        nnodes=count,
        node_rank=node_rank,
        master_addr=environ.get("PET_MASTER_ADDR", "127.0.0.1"),
        master_port=_port("PET_MASTER_PORT", environ.get("PET_MASTER_PORT", str(_PORT) if count > 1 else "0")),
        nproc=_pet_nproc(environ),
    )


def _asked_node(environ: Mapping[str, str], options: NodeOptions) -> Node:
    """The command line wins; MASTER_ADDR, MASTER_PORT and the node rank may come from a scheduler."""
    if options.nnodes is None:
        raise UserInputError(
            "--node-rank, --master-addr and --master-port need --nnodes.",
            fix="Add --nnodes N, the number of nodes.",
        )
    if NODES_VARIABLE in environ and _submitted_nodes(environ) != options.nnodes:
        raise UserInputError(
            f"--nnodes is {options.nnodes}, but the job was submitted with {environ[NODES_VARIABLE]} nodes "
            f"({NODES_VARIABLE}).",
            why="The other nodes of the job wait for as many as it was submitted with.",
            fix=f"Change cluster.nodes and submit again. To run something else in this pod, unset {NODES_VARIABLE}.",
        )
    if options.nnodes == 1:
        return Node()
    rank, address = options.node_rank, options.master_addr or environ.get("MASTER_ADDR", environ.get("PET_MASTER_ADDR"))
    for name in ("PET_NODE_RANK", "GROUP_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID", "RANK"):
        rank = _int(environ, name) if rank is None and name in environ else rank
    if rank is None or address is None:
        raise UserInputError(
            f"--nnodes {options.nnodes} also needs {'--node-rank' if rank is None else '--master-addr'}.",
            why="Nodes are numbered from 0, and all connect to the address of node 0.",
            fix=f"Add it: --nnodes {options.nnodes} --node-rank R --master-addr HOST.",
        )
    _check_index("--node-rank", rank, "--nnodes", options.nnodes)
    port = environ.get("MASTER_PORT", environ.get("PET_MASTER_PORT", str(_PORT)))
    return Node(
        nnodes=options.nnodes,
        node_rank=rank,
        master_addr=address,
        master_port=options.master_port if options.master_port is not None else _port("MASTER_PORT", port),
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
        raise UserInputError(f"Task {task} of {tasks} does not start; task 0 prints the reason.")
    raise UserInputError(
        f"srun started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}.",
        why="shardtune starts the processes of a node itself, one per GPU; every task would start a separate run.",
        fix="Use srun --ntasks-per-node=1 (with --nproc N unless it is one process per GPU). In a shell "
        "inside such a step (srun --pty), pass --nnodes 1.",
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
            f"The environment variable {name} is '{text}', not an integer.",
            fix="Unset it, or let the scheduler set it.",
        ) from None


def _port(name: str, text: str) -> int:
    port = _number(name, text)
    if not 0 <= port <= 65535:
        raise UserInputError(f"{name} is {port}, not a valid port.", fix="Set it to a number from 1 to 65535.")
    return port


def _check_index(name: str, index: int, of_name: str, count: int) -> None:
    """Processes with wrong ranks would wait for each other until the timeout."""
    if not 0 <= index < count:
        raise UserInputError(
            f"{name} is {index}, but {of_name} is {count}.",
            why=f"{name} must be between 0 and {of_name} - 1.",
            fix="Let the scheduler set both, or unset them to train on this machine alone.",
        )


def _require(environ: Mapping[str, str], *names: str, because: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserInputError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but {because}.",
            why="A worker needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a pod the PET_* ones.",
            fix="Start it with torchrun, accelerate launch or the scheduler, or unset the others to train on this "
            "machine alone.",
        )
