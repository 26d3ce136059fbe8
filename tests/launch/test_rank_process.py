"""A process whose work is done ends with its code, whatever its threads are inside of."""

from __future__ import annotations

import subprocess
import sys

import pytest
from running import REPOSITORY

IN_THE_STORE = """
import os, sys, threading, time
from torch.distributed import TCPStore
from shardtune.launch.rank_process import exit_process

def finish():
    store = TCPStore("127.0.0.1", 0, None, True)

    def set_again_and_again():
        while True:
            store.set("key", "value")

    threading.Thread(target=set_again_and_again, daemon=True).start()
    time.sleep(0.02)
    END(0)

for _ in range(20):
    if (child := os.fork()) == 0:
        finish()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

STILL_WRITING = """
import threading, time
from shardtune.launch.rank_process import exit_process

def write():
    time.sleep(0.5)
    print("written", flush=True)

threading.Thread(target=write).start()
exit_process(3)
"""

SIGNALLED = """
import atexit, os, signal
from shardtune.launch.rank_process import exit_process

atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
exit_process(0)
"""

LOADING_DATA = """
from torch.utils.data import DataLoader
from shardtune.launch.rank_process import exit_process
from shardtune.run.stop_request import ignore_stop_signals

loader = DataLoader(range(8), num_workers=2, persistent_workers=True, worker_init_fn=ignore_stop_signals)
print(sum(batch.item() for batch in loader), flush=True)
exit_process(0)
"""


def ends(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_a_thread_inside_of_torchs_store_does_not_abort_a_finished_process() -> None:
    done = ends(IN_THE_STORE.replace("END", "exit_process"))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0"] * 20, "")


@pytest.mark.slow
def test_without_that_care_it_does_abort() -> None:
    """Otherwise the test above proves nothing. One in twenty would do; about two of three abort."""
    assert "-6" in ends(IN_THE_STORE.replace("END", "sys.exit")).stdout.split()


def test_a_thread_that_still_writes_is_waited_for() -> None:
    done = ends(STILL_WRITING)
    assert (done.returncode, done.stdout) == (3, "written\n")


def test_a_signal_that_comes_when_all_is_done_changes_nothing() -> None:
    assert ends(SIGNALLED).returncode == 0


def test_processes_that_load_data_do_not_outlive_the_work() -> None:
    """They are deaf to the signal that multiprocessing ends its children with at exit."""
    done = ends(LOADING_DATA)
    assert (done.returncode, done.stdout) == (0, "28\n")


def test_an_import_that_a_stop_signal_broke_and_that_fails_otherwise_is_that_stop() -> None:
    import signal

    from shardtune.launch.rank_process import run_as_rank

    def work(stop: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except SystemExit:
            raise RecursionError("a module that is half imported") from None
        return 0

    assert run_as_rank(0, 1, work) == 130
