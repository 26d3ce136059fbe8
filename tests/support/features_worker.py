"""Run on ranks by test_feature_runs.py: one run after the other; one that is to be resumed crashes after step 2."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ranks import free_ports
from train.interrupted import run


def main(folder: str, sessions: str) -> None:
    for name, model, overrides in json.loads(sessions)[os.environ["WORLD_SIZE"]]:
        config = Path(folder) / f"{model}.yaml"
        if name.endswith("resumed"):
            _meet(Path(folder) / f"{name}-1.port")
            assert run(config, *overrides, run_id=name, crash_at=2) is None
        _meet(Path(folder) / f"{name}.port")
        assert run(config, *overrides, run_id=name) == 0, name


def _meet(file: Path) -> None:
    """On a port that is free now: of many that were asked for minutes ago, somebody else has one."""
    if os.environ["RANK"] == "0":
        (port,) = free_ports(1)
        file.with_suffix(".new").write_text(str(port))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.05)
    os.environ["MASTER_PORT"] = file.read_text()
