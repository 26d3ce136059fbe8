"""Ranks that wait for data do so without a collective, however long it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_rank_may_come_later_than_the_collective_timeout(environment: dict[str, str]) -> None:
    worker = Path(__file__).parent / "waiting_worker.py"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
         "--nproc-per-node", "2", str(worker), "15", "25"],
        env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
