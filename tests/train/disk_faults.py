"""`shardtune` on a disk that something happens to: DISK_FAULTS is JSON, from a step to [what, disk] (`small_disk.py`)."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import small_disk

from shardtune.cli.main import main
from shardtune.train.loop import TrainingLoop

tempfile.tempdir = os.environ.get("TMPDIR")  # Python would take another one if it were full
faults = json.loads(os.environ["DISK_FAULTS"])
agree = TrainingLoop._agree_on_requests


def with_faults(self: TrainingLoop) -> None:
    agree(self)
    for what, disk in faults.pop(str(self.state.global_step), []):
        getattr(small_disk, what)(Path(disk))


TrainingLoop._agree_on_requests = with_faults  # type: ignore[method-assign]
main()
