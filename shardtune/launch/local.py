"""Start the processes of this node, through torch's elastic launcher, and say how it ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from shardtune.errors import UserInputError
from shardtune.launch.failure import ERRORS_VARIABLE, first_failure
from shardtune.launch.place import Node

_STOP_SECONDS = 90  # workers finish a step and save after Ctrl-C; torch's default of 30 s kills them in the save

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def process_count(asked: int | str, device: str) -> int:
    """How many processes `auto` is here: one per GPU, or one.

    Raises:
        UserInputError: more processes than GPUs, with the device set to cuda.
    """
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if asked == "auto":
        return max(1, gpus)
    count = int(asked)
    if gpus and count > gpus:
        raise UserInputError(
            f"{count} processes were asked for, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}.",
            fix=f"Use --nproc {gpus} or auto, or parallel.device: cpu.",
        )
    return count


def threads_per_process(nproc: int) -> int:
    """The cores this process may use, shared out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


def launch(arguments: list[str], node: Node, nproc: int) -> int:
    """Run `python -m shardtune <arguments>` in `nproc` processes on this node; returns the exit code.

    Errors of the workers are collected and the first is printed once.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # its boxes repeat what we print ourselves
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(nproc)))
    # A variable, not LaunchConfig's field: torch 2.11 does not have that yet (and keeps to its 30 s).
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_STOP_SECONDS))
    with tempfile.TemporaryDirectory(prefix="shardtune-errors-") as errors:
        os.environ[ERRORS_VARIABLE] = errors
        config = LaunchConfig(
            min_nodes=node.nnodes,
            max_nodes=node.nnodes,
            nproc_per_node=nproc,
            run_id=os.environ.get("PET_RDZV_ID", "shardtune"),
            rdzv_backend="static" if node.nnodes > 1 else "c10d",
            rdzv_endpoint=f"{node.master_addr}:{node.master_port}" if node.nnodes > 1 else "127.0.0.1:0",
            rdzv_configs={"rank": node.node_rank} if node.nnodes > 1 else {},
            local_addr=None if node.nnodes > 1 else "127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "shardtune", *arguments)
        except ChildFailedError as error:
            return _explain(Path(errors), {rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as stopped:
            failure = first_failure(Path(errors))
            if failure:
                print(failure[0], file=sys.stderr)
            return 128 + stopped.sigval
    return 0


def _explain(errors: Path, exit_codes: dict[int, int]) -> int:
    """Say what ended the run. `exit_codes` by rank, in the order they were noticed."""
    # A killed worker cannot speak; what the others say then ("connection reset") is only its echo.
    killed = [(rank, -code) for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM]
    if killed:
        rank, number = killed[0]
        print(f"error: Rank {rank} was killed by signal {number} ({signal.Signals(number).name}).", file=sys.stderr)
        if number == signal.SIGKILL:
            print("  why: Linux does that when memory runs out; so does an operator or a scheduler.", file=sys.stderr)
            print(
                "  fix: Look for 'Out of memory' in dmesg; give the job more memory or a smaller batch.",
                file=sys.stderr,
            )
        return 128 + number
    failure = first_failure(errors)
    if failure:
        print(failure[0], file=sys.stderr)
        return failure[1]
    code = next(iter(exit_codes.values()))
    if code not in _STOPPED:  # stopped on request: the worker has said so
        print(f"error: A worker ended with exit code {code} without a word.", file=sys.stderr)
    return code if code > 0 else 128 - code
