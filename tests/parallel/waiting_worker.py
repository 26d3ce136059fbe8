"""Run under torchrun by test_waiting.py: rank 1 comes later than any collective would wait."""

from __future__ import annotations

import os
import sys
import time

from shardtune.config.schema import ParallelSection
from shardtune.parallel.processes import join

with join(ParallelSection(device="cpu", timeout_minutes=float(sys.argv[1]) / 60)) as processes:
    if processes.rank == 1:
        time.sleep(float(sys.argv[2]))
    processes.wait_for_all("data")
    assert processes.agree(processes.rank == 1)
    # Waiting is what is tested. torch 2.13 sometimes aborts while gloo groups that never spoke are taken down.
    os._exit(0)
