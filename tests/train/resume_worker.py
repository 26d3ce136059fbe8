"""Run on ranks by `interrupted.run_on_ranks`: several runs one after the other, each in a process group of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from interrupted import run


def _own_disk_only(event: str, args: tuple[Any, ...]) -> None:
    """Ranks but 0 act as if they were on a machine that has no checkpoints: looking for one breaks the test."""
    if event == "open" and "/checkpoints/step-" in str(args[0]):
        raise AssertionError(f"rank {os.environ['RANK']} reads {args[0]}")


def main(config: str, sessions: str) -> None:
    if os.environ["RANK"] != "0":
        sys.addaudithook(_own_disk_only)
    for session in json.loads(sessions)[os.environ["WORLD_SIZE"]]:
        os.environ["MASTER_PORT"] = str(session.pop("port"))
        code = run(Path(config), *session.pop("overrides", ()), **session)
        assert code == (None if "crash_at" in session else 75 if "stop_at" in session else 0), (session, code)
