"""Run under torchrun by test_waiting.py: rank 1 comes later than any collective would wait."""

from __future__ import annotations

import sys
import time

from shardtune.config.schema import ParallelSection
from shardtune.launch.ending import leave
from shardtune.parallel import processes as parallel

parallel._MARGIN = parallel.timedelta(0)
tiny = 1e-6
section = ParallelSection(
    device="cpu",
    load_timeout_minutes=float(sys.argv[1]) / 60,
    step_timeout_minutes=tiny,
    checkpoint_timeout_minutes=tiny,
)

with parallel.join(section) as processes:
    if processes.rank == 1:
        time.sleep(float(sys.argv[2]))
    processes.wait_for_all("data")
    assert processes.agree(processes.rank == 1)
leave(0)
