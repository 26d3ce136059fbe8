"""The launcher as the main process of a container: process 1, which the kernel keeps signals from."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardtune.run.exit_codes import PREEMPTED

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a process 1 of one's own needs root and unshare"
)


def in_its_own_pids(environment: dict[str, str], code: str) -> tuple[subprocess.Popen[str], int]:
    """Python as process 1; also its number outside."""
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", code],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    return process, int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


# What takes seconds in a container, the imports, takes for ever here: the signal comes in the middle of them.
SLOW_IMPORT = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "shardtune.cli":
            print(os.getpid(), flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from shardtune.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_it_imports_ends_the_main_process_of_a_container(
    environment: dict[str, str], number: signal.Signals
) -> None:
    process, pid = in_its_own_pids(environment, SLOW_IMPORT)
    begin = time.monotonic()
    os.kill(pid, number)
    try:
        assert process.wait(timeout=20) == PREEMPTED and time.monotonic() - begin < 10
    finally:
        process.kill()
        process.wait()
