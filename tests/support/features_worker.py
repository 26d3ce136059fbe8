"""Run on ranks by test_feature_runs.py: one run after the other; one that is to be resumed crashes after step 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

from train.interrupted import run


def main(folder: str, ports: str, sessions: str) -> None:
    # A run that crashes, and the one that goes on with it, share a port: its store has ended with its process group.
    for port, (name, model, overrides) in zip(json.loads(ports), json.loads(sessions), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = Path(folder) / f"{model}.yaml"
        if name.endswith("resume"):
            assert run(config, *overrides, run_id=name, crash_at=2) is None
        assert run(config, *overrides, run_id=name) == 0, name
