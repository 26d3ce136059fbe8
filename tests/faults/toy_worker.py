"""A rank that trains nothing: it reads, it computes with the others, step after step, as a run does, and fails on demand.

Everything around the steps is the product's own: the process group, the watchdog, stopping and ending. Faults come from
FAULT (`KIND:RANK:STEP`), which nothing but this file reads.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardtune.config.schema import ParallelSection
from shardtune.launch.rank_process import run_as_rank
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import join
from shardtune.run.exit_codes import PREEMPTED
from shardtune.run.stop_request import StopRequest
from shardtune.run.watchdog import BATCH, STEP, Limits, Watchdog

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["TOY_FOLDER"])
SECTION = ParallelSection.model_validate_json(os.environ["TOY_PARALLEL"])
STEPS = int(os.environ.get("TOY_STEPS", "100000"))
KIND, _, WHERE = os.environ.get("FAULT", "::").partition(":")
VICTIM, _, AT = WHERE.partition(":")


def fault(step: int, place: str) -> None:
    if KIND == "" or int(VICTIM) != RANK or step != int(AT) or os.environ["SHARDTUNE_STORE_PREFIX"] != "attempt0":
        return
    if KIND == "exception" and place == "step":
        raise ValueError("the toy was told to fail here")
    if KIND == "hang-data" and place == "data":
        time.sleep(1e6)


def work(stop: StopRequest) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    limits = Limits.of(SECTION)
    with Watchdog(RANK, limits) as watchdog, join(SECTION) as processes:
        watchdog.write_to(FOLDER, EventLog(FOLDER, RANK))
        if os.environ.get("TOY_SLOW_START"):
            (FOLDER / f"started-{RANK}").touch()
            time.sleep(float(os.environ["TOY_SLOW_START"]))
        stop.wait_for_step()
        total = torch.zeros(1)
        for step in range(STEPS):
            watchdog.enter(BATCH, step)
            fault(step, "data")
            time.sleep(0.02)
            watchdog.enter(STEP, step)
            fault(step, "step")
            part = torch.tensor([float(RANK + 1)])
            dist.all_reduce(part)
            total += part
            (FOLDER / f"step-{RANK}").write_text(str(step))
            if processes.agree(stop.requested):
                (FOLDER / f"saved-{RANK}").write_text(str(step))
                time.sleep(float(os.environ.get("TOY_SLOW_SAVE", "0")))
                return PREEMPTED
        (FOLDER / f"total-{RANK}").write_text(str(total.item()))
    return 0


sys.exit(run_as_rank(RANK, WORLD, work))
