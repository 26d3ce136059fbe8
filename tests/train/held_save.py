"""`shardtune` with a disk that holds one save: HELD_STEP's is written but not finished until the file HELD_UNTIL is there.

While it is held, HELD_UNTIL + ".waiting" exists.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from shardtune.checkpoint.snapshot import Snapshot
from shardtune.cli.main import main

step, until = int(os.environ["HELD_STEP"]), Path(os.environ["HELD_UNTIL"])
write = Snapshot.write


def held(self: Snapshot, folder: Path, config: Any) -> None:
    write(self, folder, config)
    if self.trainer["step"] == step and not until.exists():
        until.with_name(until.name + ".waiting").touch()
        while not until.exists():
            time.sleep(0.02)


Snapshot.write = held  # type: ignore[method-assign]
main()
