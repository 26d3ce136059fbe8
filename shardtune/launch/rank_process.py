"""How does a rank's process end? With an exit code and, if it failed, a record; never with an abort after its work."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from shardtune.run.channel import LAUNCHER_VARIABLE
from shardtune.run.failure import report_failure
from shardtune.run.stop_request import StopRequest, ignore_stop_signals

STOPPED_EARLY = "Stopped before the first step; there is nothing to save."
_THREADS_SECONDS = 60.0  # for threads that are not daemons, such as one that writes a checkpoint
_UPLOAD_SECONDS = 600.0  # for trackers, which upload what they have at exit


def run_as_rank(rank: int, world_size: int, work: Callable[[StopRequest], int]) -> int:
    """Do `work` as one rank of a run; returns its exit code, or exits the process with it where there are others."""
    prints = rank == 0 and LAUNCHER_VARIABLE not in os.environ  # a launcher prints it once for all ranks
    with StopRequest(acknowledge=prints) as stop:
        try:
            code = work(stop)
        except SystemExit:
            if not stop.requested:
                raise
            code = stop.exit_code
            if prints:
                print(STOPPED_EARLY, flush=True)
        except Exception as error:  # noqa: BLE001 - the outermost handler of a rank: recorded, and its code returned
            # An import that the signal's SystemExit broke off may be tried again by a library, and fail otherwise.
            code = stop.exit_code if stop.came_early else report_failure(error, rank)
            if stop.came_early and prints:
                print(STOPPED_EARLY, flush=True)
            if world_size > 1:
                os._exit(code)  # threads of a broken process group would keep this process alive
        if world_size > 1:
            exit_process(code)
    return code


def exit_process(
    code: int,
    threads_seconds: float = _THREADS_SECONDS,
    exit_seconds: float = _UPLOAD_SECONDS,
    last: Callable[[], None] = lambda: None,
) -> NoReturn:
    """End this process with `code`, whatever its threads are doing.

    Without finalizing the interpreter: that unwinds threads which are inside of C++ (torch's process groups and
    stores, a data loader that pins memory), and aborts the process ("terminate called without an active exception",
    torch 2.13) after all its work is done. What finalization would wait for is waited for here, with a timeout
    each for threads and for what runs at exit; `last` runs after all of that.
    """
    ignore_stop_signals()  # the work is done, and its code decided
    deadline = time.monotonic() + threads_seconds
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a process that loads data is killed
    for child in multiprocessing.active_children():
        if child.daemon:  # a data loader ignores the SIGTERM that multiprocessing would send, and then wait forever for
            child.kill()
    timeout = threading.Timer(exit_seconds, os._exit, (code,))
    timeout.daemon = True
    timeout.start()
    atexit._run_exitfuncs()  # trackers finish their uploads there
    last()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a pipe without a reader, a closed stream
            stream.flush()
    os._exit(code)
