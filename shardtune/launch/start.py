"""From a config file to a running process: checks first, then this process trains, or starts those that do."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardtune.config import ResolvedConfig, load_config
from shardtune.config.accelerate_file import neutralise
from shardtune.errors import UserInputError
from shardtune.launch.accelerate_machines import other_process_count, refuse_lone_machine
from shardtune.launch.defaults import banner, set_safe_defaults
from shardtune.launch.ending import STOPPED_EARLY, as_rank
from shardtune.launch.local import launch, process_count, threads_per_process
from shardtune.launch.named_paths import check_inputs
from shardtune.launch.network import read_network
from shardtune.launch.place import Asked, Node, Worker, read_place, unused_master
from shardtune.run.evaluation import Evaluation, adapter_folder
from shardtune.run.exit_codes import INTERRUPTED, PREEMPTED
from shardtune.run.folder import CHECKPOINTS, FOLDER_VARIABLE, RunFolder
from shardtune.run.parent_death import LAUNCHER_VARIABLE
from shardtune.run.stop_request import StopRequest
from shardtune.run.which_run import choose_run
from shardtune.terminal import fitted


def start(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    environ: MutableMapping[str, str],
    asked: Asked = Asked(),  # noqa: B008 - frozen
    *,
    force: bool = False,
    evaluation: Evaluation | None = None,
) -> int:
    """Train as `config` says; returns the exit code.

    Whatever can be found wrong without torch is found here, once, before any process is started.

    Args:
        force: Start more processes than this machine has memory or cores for.
        evaluation: Evaluate this instead of training; no run folder is made.
    """
    place = read_place(environ, asked)
    set_safe_defaults(environ)
    if isinstance(place, Worker):
        # A worker's errors go to its launcher, which tells them once for all ranks.
        return _work(config, overrides, accelerate_config, run_id, place, environ, evaluation)
    environ.pop(FOLDER_VARIABLE, None)  # of another run that this command was started in
    # Reading the config and importing torch take seconds, and a scheduler may not wait.
    with ExitStack() as at_end, StopRequest() as stop:
        try:
            train = _prepare(
                config, overrides, accelerate_config, run_id, place, environ, asked, at_end, evaluation, force=force
            )
            stop.wait_for_step()  # unless code that swallows exceptions got a signal, what trains listens from here on
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
    asked: Asked,
    at_end: ExitStack,
    evaluation: Evaluation | None,
    *,
    force: bool,
) -> Callable[[], int]:
    """Check what can be checked, choose the run's folder and hold it until `at_end`, and return what trains."""
    network = read_network(environ, node)
    resolved = load_config(config, overrides, accelerate_config, environ)
    if evaluation is None:  # a loss is the same on any number of processes
        refuse_lone_machine(resolved, environ, asked, config)
    needs_model = node.node_rank == 0 or resolved.config.model.load == "read-all"  # others may get it from rank 0
    check_inputs(resolved.config, model=needs_model)
    if evaluation is not None and evaluation.adapter is not None and node.node_rank == 0:
        adapter_folder(evaluation.adapter)
    nproc = _processes(node, resolved, force=force)
    out = sys.stderr if evaluation is not None and evaluation.as_json else sys.stdout
    print(_banner(node, nproc, network.insecure), file=out, flush=True)
    if notice := unused_master(environ, asked):
        print(f"notice {notice}", file=out, flush=True)
    command = _command(config, overrides, accelerate_config, run_id, evaluation)
    here = partial(_work, config, overrides, accelerate_config, run_id, Worker(0, 1, 0), environ, evaluation)
    if evaluation is not None and nproc == node.nnodes == 1:
        return here
    if node.nnodes > 1 or evaluation is not None:  # rank 0 makes the folder, wherever it is; an evaluation has none
        return partial(launch, command, node, nproc, resolved.config, environ)
    chosen = choose_run(resolved.config, run_id, nproc)
    at_end.callback(chosen.held.lease.release)
    if chosen.told:
        print(fitted(chosen.told, sys.stdout), flush=True)
    environ[FOLDER_VARIABLE] = str(chosen.folder)
    train = partial(launch, command, node, nproc, resolved.config, environ)
    if nproc == 1:
        train = here
    return partial(_train_in, chosen.held, train)


def _train_in(held: RunFolder, train: Callable[[], int]) -> int:
    code = train()
    if code in (INTERRUPTED, PREEMPTED) and not _has_ended(held):
        held.discard_untrained()
    if code == UserInputError.exit_code and not held.discard_untrained() and (held.path / CHECKPOINTS).is_dir():
        print(f"The run is kept as it was: {held.path}", file=sys.stderr)  # a restart was refused, not the run
    return code


def _has_ended(held: RunFolder) -> bool:
    """Whether the run wrote down that it was stopped, as it does from its first step on; its save may have failed."""
    try:
        return b'"event": "run_end"' in (held.path / "events-rank0.jsonl").read_bytes()
    except OSError:
        return False


def processes_for(resolved: ResolvedConfig, environ: MutableMapping[str, str]) -> tuple[int, int]:
    """How many processes a run started here would have: on this machine, and on all together."""
    place = read_place(environ)
    if isinstance(place, Worker):
        return int(environ.get("LOCAL_WORLD_SIZE", place.world_size)), place.world_size
    here = _processes(place, resolved, force=False)
    return here, here * place.nnodes


def _processes(node: Node, resolved: ResolvedConfig, *, force: bool) -> int:
    asked = resolved.config.parallel.nproc
    if asked == "auto" and node.nproc is not None:
        asked = node.nproc
    return process_count(asked, resolved.config.parallel.device, force=force)


def _work(
    config: Path,
    overrides: list[str],
    accelerate_config: Path | None,
    run_id: str | None,
    place: Worker,
    environ: MutableMapping[str, str],
    evaluation: Evaluation | None,
) -> int:
    # accelerate warns when it is unset, and then sets what torch takes anyway.
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(int(environ.get("LOCAL_WORLD_SIZE", "1")))))
    environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))

    def work(stop: StopRequest) -> int:
        resolved = load_config(config, overrides, accelerate_config, environ)
        neutralise(environ)  # what accelerate launch set is translated by now; the Trainer must not act on it too
        if evaluation is None and (notice := other_process_count(resolved, place.world_size)):
            resolved = replace(resolved, notices=(*resolved.notices, notice))
        from shardtune.train.run import train

        return train(resolved, run_id=run_id, stop=stop, evaluation=evaluation)

    if LAUNCHER_VARIABLE not in environ and place.world_size > 1 and place.local_rank == 0:
        master = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
        print(f"{_banner(Node(), 1)}, rank {place.rank} of {place.world_size}, master {master}", flush=True)
    return as_rank(place.rank, place.world_size, work)


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
    words = [sys.executable, "-m", "shardtune", "train" if evaluation is None else "eval-loss", str(config)]
    words += evaluation.words if evaluation is not None else []
    for override in overrides:
        words += ["--override", override]
    if accelerate_config is not None:
        words += ["--accelerate-config", str(accelerate_config)]
    if run_id is not None:
        words += ["--run-id", run_id]
    return words
