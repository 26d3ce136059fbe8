"""How tests run the command line and read what a run has written."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
Command = Callable[..., subprocess.CompletedProcess[str]]


def events(run: Path, kind: str, rank: int = 0) -> list[dict]:
    """The events of one kind that one rank of a run has written."""
    lines = (run / f"events-rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
