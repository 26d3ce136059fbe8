"""Run under torchrun by test_waiting.py: rank 1 comes later than any collective would wait."""

from __future__ import annotations

import sys
import time

from shardtune.config.schema import ParallelSection
from shardtune.parallel.processes import join

with join(ParallelSection(device="cpu", timeout_minutes=float(sys.argv[1]) / 60)) as processes:
    if processes.rank == 1:
        time.sleep(float(sys.argv[2]))
    processes.wait_for_all("data")
    assert processes.agree(processes.rank == 1)
