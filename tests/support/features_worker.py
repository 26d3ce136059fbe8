"""Run on ranks by test_features.py: one run after the other, and for each how it ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

from train.interrupted import run

from shardtune.errors import ShardtuneError


def main(folder: str, ports: str, sessions: str) -> None:
    outcomes: dict[str, str] = {}
    for port, (name, model, overrides) in zip(json.loads(ports), json.loads(sessions), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config, run_id = Path(folder) / f"{model}.yaml", name.replace(" ", "-").replace(":", "")
        try:
            if "resume" in name:
                run(config, *overrides, run_id=run_id, crash_at=2)
            assert run(config, *overrides, run_id=run_id) == 0
        except ShardtuneError as error:
            outcomes[name] = f"refused: {error.what} {error.why}"
        else:
            outcomes[name] = run_id
    if os.environ["RANK"] == "0":
        (Path(folder) / f"{os.environ['WORLD_SIZE']}.json").write_text(json.dumps(outcomes), encoding="utf-8")
