"""From a config file to running processes: checks first, then this process trains, or launches those that do."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO

from shardtune.config import ResolvedConfig, load_config
from shardtune.config.accelerate_file import neutralise
from shardtune.errors import UserInputError
from shardtune.launch.accelerate_machines import other_process_count, refuse_lone_machine
from shardtune.launch.launcher import launch, process_count, threads_per_process
from shardtune.launch.named_paths import check_inputs
from shardtune.launch.network import Network, read_network
from shardtune.launch.process_role import (
    NODES_VARIABLE,
    Node,
    NodeOptions,
    Worker,
    detect_role,
    refuse_lone_pod,
    unused_master,
)
from shardtune.launch.rank_process import STOPPED_EARLY, run_as_rank
from shardtune.launch.safe_defaults import set_defaults_of_nodes, set_safe_defaults
from shardtune.run.channel import LAUNCHER_VARIABLE
from shardtune.run.evaluation import Evaluation, adapter_folder
from shardtune.run.exit_codes import INTERRUPTED, PREEMPTED
from shardtune.run.folder import CHECKPOINTS, FOLDER_VARIABLE, RunFolder
from shardtune.run.stop_request import StopRequest
from shardtune.run.which_run import choose_run
from shardtune.terminal import fitted, is_verbose

_INSECURE = (
    "warning: insecure network: anyone who can connect to the master's port can join this run or stop it "
    "(SHARDTUNE_SECRET is not set; docs/security.md)"
)
Preflight = Callable[[ResolvedConfig, Node, int, Mapping[str, str]], None]


def start(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    environ: MutableMapping[str, str],
    options: NodeOptions = NodeOptions(),  # noqa: B008 - frozen
    *,
    force: bool = False,
    evaluation: Evaluation | None = None,
    preflight: Preflight | None = None,
) -> int:
    """Train as `config` says; returns the exit code.

    Whatever can be checked without torch is checked here, once, before any process is started.

    Args:
        force: Start more processes than this machine has memory or cores for.
        evaluation: Evaluate this instead of training; no run folder is made.
        preflight: Raises if this machine is not fit for its processes; None checks nothing.
    """
    role = detect_role(environ, options)
    reasons = set_safe_defaults(environ)
    if isinstance(role, Worker):
        # A worker's errors go to its launcher, which prints them once for all ranks.
        return _work(config, overrides, accelerate_config, run_id, role, environ, evaluation, preflight)
    environ.pop(FOLDER_VARIABLE, None)  # of another run that this command was started in
    # Reading the config and importing torch take seconds, and a scheduler may not wait.
    with ExitStack() as at_end, StopRequest() as stop:
        try:
            train = _prepare(
                config, overrides, accelerate_config, run_id, role, environ, options, at_end, evaluation, preflight,
                force=force, reasons=reasons,
            )  # fmt: skip
            stop.wait_for_step()  # raises if a signal was swallowed; from here on the training handles signals
        except SystemExit:
            if not stop.requested:
                raise
            print(STOPPED_EARLY, flush=True)
            return stop.exit_code
        return train()


def _prepare(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    node: Node,
    environ: MutableMapping[str, str],
    options: NodeOptions,
    at_end: ExitStack,
    evaluation: Evaluation | None,
    preflight: Preflight | None,
    *,
    force: bool,
    reasons: Mapping[str, str],
) -> Callable[[], int]:
    """Check the inputs, choose the run's folder and hold its lease until `at_end`, and return what trains."""
    network = read_network(environ, node)
    resolved = load_config(config, overrides, accelerate_config, environ)
    if evaluation is None:  # a loss is the same on any number of processes
        refuse_lone_machine(resolved, environ, options, config)
        refuse_lone_pod(node, resolved.config.cluster.nodes, environ, options)
    # With other values it may come from rank 0.
    needs_model = node.node_rank == 0 or resolved.config.model.load in ("read-all", "read-once")
    check_inputs(resolved.config, model=needs_model)
    if evaluation is not None and evaluation.adapter is not None and node.node_rank == 0:
        adapter_folder(evaluation.adapter)
    nproc = processes_of(node, resolved, force=force)
    out = sys.stderr if evaluation is not None and evaluation.as_json else sys.stdout
    announce(node, nproc, network, environ, options, reasons, trains=evaluation is None, out=out)
    if preflight is not None and nproc * node.nnodes > 1:
        preflight(resolved, node, nproc, environ)
    command = _command(config, overrides, accelerate_config, run_id, evaluation)
    here = partial(_work, config, overrides, accelerate_config, run_id, Worker(0, 1, 0), environ, evaluation)
    if evaluation is not None and nproc == node.nnodes == 1:
        return here
    if node.nnodes > 1 or evaluation is not None:  # rank 0 makes the folder, wherever it is; an evaluation has none
        return partial(launch, command, node, nproc, resolved.config, environ)
    chosen = choose_run(resolved.config, run_id, nproc)
    at_end.callback(chosen.run_folder.lease.release)
    if chosen.notice:
        print(fitted(chosen.notice, sys.stdout), flush=True)
    environ[FOLDER_VARIABLE] = str(chosen.folder)
    train = partial(launch, command, node, nproc, resolved.config, environ)
    if nproc == 1:
        train = here
    return partial(_train_in, chosen.run_folder, train)


def announce(
    node: Node,
    nproc: int,
    network: Network,
    environ: MutableMapping[str, str],
    options: NodeOptions,
    reasons: Mapping[str, str],
    *,
    trains: bool = True,
    out: IO[str] | None = None,
) -> None:
    """The banner, the variables that were set (those of several nodes are set here), and what is ignored."""
    print(_banner(node, nproc, network.insecure), file=out, flush=True)
    if node.nnodes > 1 and trains:
        reasons = {**reasons, **set_defaults_of_nodes(environ)}
    if is_verbose() or (NODES_VARIABLE in environ and node.node_rank == 0):
        for name, reason in reasons.items():
            print(f"set       {name}={environ[name]}: {reason}", file=out, flush=True)
    if notice := unused_master(environ, options):
        print(f"notice {notice}", file=out, flush=True)


def _train_in(run_folder: RunFolder, train: Callable[[], int]) -> int:
    code = train()
    if code in (INTERRUPTED, PREEMPTED) and not _has_ended(run_folder):
        run_folder.discard_untrained()
    if (
        code == UserInputError.exit_code
        and not run_folder.discard_untrained()
        and (run_folder.path / CHECKPOINTS).is_dir()
    ):
        print(f"The run is unchanged: {run_folder.path}", file=sys.stderr)  # a restart was refused, not the run
    return code


def _has_ended(run_folder: RunFolder) -> bool:
    """Whether the run recorded its end, as it does from its first step on; its save may have failed."""
    try:
        return b'"event": "run_end"' in (run_folder.path / "events-rank0.jsonl").read_bytes()
    except OSError:
        return False


def processes_for(resolved: ResolvedConfig, environ: MutableMapping[str, str]) -> tuple[int, int]:
    """How many processes a run started here would have: on this machine, and on all together."""
    role = detect_role(environ)
    if isinstance(role, Worker):
        return int(environ.get("LOCAL_WORLD_SIZE", role.world_size)), role.world_size
    here = processes_of(role, resolved, force=False)
    return here, here * role.nnodes


def processes_of(node: Node, resolved: ResolvedConfig, *, force: bool) -> int:
    nproc = resolved.config.parallel.nproc
    if nproc == "auto" and node.nproc is not None:
        nproc = node.nproc
    return process_count(nproc, resolved.config.parallel.device, force=force)


def _work(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    role: Worker,
    environ: MutableMapping[str, str],
    evaluation: Evaluation | None,
    preflight: Preflight | None = None,
) -> int:
    # accelerate warns when it is unset, and then sets what torch takes anyway.
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(int(environ.get("LOCAL_WORLD_SIZE", "1")))))
    environ.update(RANK=str(role.rank), WORLD_SIZE=str(role.world_size), LOCAL_RANK=str(role.local_rank))

    def work(stop: StopRequest) -> int:
        resolved = load_config(config, overrides, accelerate_config, environ)
        if preflight is not None and LAUNCHER_VARIABLE not in environ and role.local_rank == 0 < role.world_size - 1:
            here = int(environ.get("LOCAL_WORLD_SIZE", "1"))
            first = Node(max(1, role.world_size // here), role.rank // here, environ["MASTER_ADDR"])
            preflight(resolved, first, here, environ)
        neutralise(environ)  # what accelerate launch set is translated by now; accelerate must not act on it too
        if evaluation is None and (notice := other_process_count(resolved, role.world_size)):
            resolved = replace(resolved, notices=(*resolved.notices, notice))
        gc.disable()  # 0.8 s of each rank's start (torch 2.13): what is imported stays, now and in later collections
        from shardtune.train.run import train

        gc.freeze()
        gc.enable()
        return train(resolved, run_id=run_id, stop=stop, evaluation=evaluation)

    if LAUNCHER_VARIABLE not in environ and role.world_size > 1 and role.local_rank == 0:
        master = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
        print(f"{_banner(Node(), 1)}, rank {role.rank} of {role.world_size}, master {master}", flush=True)
    return run_as_rank(role.rank, role.world_size, work)


def banner(nnodes: int, node_rank: int, nproc: int, master: str, gpus: list[str], insecure: bool = False) -> str:
    """One line per node: time, host, node rank, master, processes and GPUs; a second one for an insecure network."""
    kinds = {name: gpus.count(name) for name in gpus}
    computes = ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "no GPU"
    where = f"node {node_rank} of {nnodes}, master {master}, " if nnodes > 1 else ""
    processes = f"{nproc} process{'es' if nproc > 1 else ''}"
    line = f"{datetime.now():%Y-%m-%d %H:%M:%S}  {socket.gethostname()}  {where}{processes}, {computes}"
    return f"{line}\n{_INSECURE}" if insecure else line


def _banner(node: Node, nproc: int, insecure: bool = False) -> str:
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return banner(node.nnodes, node.node_rank, nproc, f"{node.master_addr}:{node.master_port}", gpus, insecure)


def _command(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    evaluation: Evaluation | None,
) -> list[str]:
    arguments = [sys.executable, "-m", "shardtune", "train" if evaluation is None else "eval-loss", str(config)]
    arguments += evaluation.arguments if evaluation is not None else []
    for override in overrides:
        arguments += ["--override", override]
    if accelerate_config is not None:
        arguments += ["--accelerate-config", str(accelerate_config)]
    if run_id is not None:
        arguments += ["--run-id", run_id]
    return arguments
