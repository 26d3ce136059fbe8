"""How does a worker end? With a code and, if it failed, a record; never with an abort after the work is done."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from shardtune.launch.failure import report_failure
from shardtune.train.interrupt import StopRequest

STOPPED_EARLY = "Stopped on request before the first step; there is nothing to save."


def as_rank(rank: int, world_size: int, work: Callable[[StopRequest], int]) -> int:
    """Do `work` as one rank of a run; returns its exit code, or leaves the process with it where there are others."""
    with StopRequest() as stop:
        try:
            code = work(stop)
        except SystemExit:
            if not stop.requested:
                raise
            code = stop.exit_code
            if rank == 0:
                print(STOPPED_EARLY, flush=True)
        except Exception as error:  # noqa: BLE001 - the last line of defence of a process: told, and its code returned
            code = report_failure(error, rank)
            if world_size > 1:
                os._exit(code)  # threads of a broken process group would keep this process alive
    if world_size > 1:
        leave(code)
    return code


def leave(code: int) -> NoReturn:
    """End without taking the interpreter down: threads of torch's process groups that are still there then abort the
    process now and then ("terminate called without an active exception", torch 2.13), after everything is done."""
    atexit._run_exitfuncs()  # trackers finish their uploads there
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
