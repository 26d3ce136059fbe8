"""`shardtune` on a disk that something happens to: DISK_FAULTS is JSON, from a step to [what, disk] (`small_disk.py`)."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import small_disk

from shardtune.cli.main import main
from shardtune.train.step_watch import ProgressWatch

tempfile.tempdir = os.environ.get("TMPDIR")  # Python would take another one if it were full
faults = json.loads(os.environ["DISK_FAULTS"])
on_step_end = ProgressWatch.on_step_end


def with_faults(self: ProgressWatch, args: Any, state: Any, control: Any, **given: Any) -> None:
    on_step_end(self, args, state, control, **given)
    for what, disk in faults.pop(str(state.global_step), []):
        getattr(small_disk, what)(Path(disk))


ProgressWatch.on_step_end = with_faults  # type: ignore[method-assign]
main()
