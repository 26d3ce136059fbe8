"""Ranks end with their launcher, also while they are still importing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import REPOSITORY
from toys import toy_config

# Starts two ranks as `launch` does, says their pids, and waits to be killed.
LAUNCHER = """
import os, sys, time
from shardtune.launch.workers import LocalWorkers, RankAssignment

assignment = RankAssignment(
    attempt=0, node=0, nnodes=1, first_rank=0, nproc=2, world_size=2, master_addr="127.0.0.1", master_port=1,
    store_port=1, host="here",
)
command = [sys.executable, "-m", "shardtune", "train", sys.argv[1]]
workers = LocalWorkers(command, assignment, {**os.environ, "PYTHONPATH": sys.argv[2]})
print(*(process.pid for process in workers._processes.values()), flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")


@pytest.fixture
def path_with_slow_torch(tmp_path: Path) -> str:
    """A torch whose import takes as long as on a file system that hangs."""
    torch = tmp_path / "slow" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(
        "import time, pathlib, os\npathlib.Path(os.environ['IMPORTING'], os.environ['RANK']).touch()\ntime.sleep(600)\n"
    )
    return f"{torch.parent}:{REPOSITORY}"


@contextmanager
def launcher_with_two_ranks(
    tmp_path: Path, config: Path, path: str, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    command = [sys.executable, "-c", LAUNCHER, str(config), path]
    environ = {**environment, "PYTHONPATH": str(REPOSITORY), "IMPORTING": str(tmp_path)}
    launcher = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    ranks: list[int] = []
    try:
        assert launcher.stdout is not None
        ranks = [int(word) for word in launcher.stdout.readline().split()]
        yield launcher, ranks
    finally:
        for pid in [launcher.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 20) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.5])
def test_ranks_of_a_launcher_that_is_killed_right_after_their_start_are_gone_within_seconds(
    tmp_path: Path,
    toy_model: Path,
    toy_data: Path,
    path_with_slow_torch: str,
    environment: dict[str, str],
    delay: float,
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data)
    with launcher_with_two_ranks(tmp_path, config, path_with_slow_torch, environment) as (launcher, ranks):
        time.sleep(delay)
        launcher.kill()
        assert len(ranks) == 2 and wait_until_gone(ranks) == []


def test_ranks_that_are_importing_torch_are_gone_within_seconds_of_their_launcher(
    tmp_path: Path, toy_model: Path, toy_data: Path, path_with_slow_torch: str, environment: dict[str, str]
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data)
    with launcher_with_two_ranks(tmp_path, config, path_with_slow_torch, environment) as (launcher, ranks):
        deadline = time.monotonic() + 60
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            assert time.monotonic() < deadline and all(map(is_running, ranks))
            time.sleep(0.02)
        launcher.kill()
        assert wait_until_gone(ranks) == []
