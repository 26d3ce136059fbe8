"""Run on ranks by test_waiting.py: rank 1 comes later than any collective would wait."""

from __future__ import annotations

import time
from pathlib import Path

from shardtune.config.schema import ParallelSection
from shardtune.parallel import processes as parallel


def main(load: str, late: str, out: str) -> None:
    parallel._MARGIN = parallel.timedelta(0)
    tiny = 1e-6
    section = ParallelSection(
        device="cpu",
        load_timeout_minutes=float(load) / 60,
        step_timeout_minutes=tiny,
        checkpoint_timeout_minutes=tiny,
    )
    with parallel.join(section) as processes:
        if processes.rank == 1:
            time.sleep(float(late))
        processes.wait_for_all("data")
        agreed = processes.agree(processes.rank == 1)
        (Path(out) / f"rank{processes.rank}.txt").write_text(str(agreed))
