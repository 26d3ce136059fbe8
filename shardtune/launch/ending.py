"""How does a worker end? With a code and, if it failed, a record; never with an abort after the work is done."""

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

from shardtune.run.failure import report_failure
from shardtune.run.parent_death import LAUNCHER_VARIABLE
from shardtune.run.stop_request import StopRequest, ignore_stop_signals

STOPPED_EARLY = "Stopped on request before the first step; there is nothing to save."
_THREADS_SECONDS = 60.0  # for threads that are not daemons, such as one that writes a checkpoint
_UPLOAD_SECONDS = 600.0  # for trackers, which upload what they have at exit


def as_rank(rank: int, world_size: int, work: Callable[[StopRequest], int]) -> int:
    """Do `work` as one rank of a run; returns its exit code, or leaves the process with it where there are others."""
    speaks = rank == 0 and LAUNCHER_VARIABLE not in os.environ  # a launcher speaks itself, however early its ranks end
    with StopRequest(acknowledge=speaks) as stop:
        try:
            code = work(stop)
        except SystemExit:
            if not stop.requested:
                raise
            code = stop.exit_code
            if speaks:
                print(STOPPED_EARLY, flush=True)
        except Exception as error:  # noqa: BLE001 - the last line of defence of a process: told, and its code returned
            code = report_failure(error, rank)
            if world_size > 1:
                os._exit(code)  # threads of a broken process group would keep this process alive
        if world_size > 1:
            leave(code)
    return code


def leave(code: int) -> NoReturn:
    """End this process with `code`, whatever its threads are doing.

    Without taking the interpreter down: that unwinds threads which are inside of C++ (torch's process groups and
    stores, a data loader that pins memory), and aborts the process ("terminate called without an active exception",
    torch 2.13) after all its work is done. What the interpreter would have waited for is waited for here, for a while.
    """
    ignore_stop_signals()  # the work is done, and its code decided
    deadline = time.monotonic() + _THREADS_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a process that loads data is killed
    for child in multiprocessing.active_children():
        if child.daemon:  # loads data: deaf to the SIGTERM that multiprocessing would send it, and then wait for ever
            child.kill()
    late = threading.Timer(_UPLOAD_SECONDS, os._exit, (code,))
    late.daemon = True
    late.start()
    atexit._run_exitfuncs()  # trackers finish their uploads there
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a pipe whose reader has gone, a stream that is closed
            stream.flush()
    os._exit(code)
