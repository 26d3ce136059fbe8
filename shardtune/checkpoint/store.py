"""What survives a crash? Checkpoints appear whole or not at all, and only the newest few (and the best) stay."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from shardtune.durable import fsync

_NAME = re.compile(r"step-(\d+)")


class CheckpointStore:
    """The folder `checkpoints/` of a run. One process (rank 0) writes.

    After a crash at any line: every `step-N` folder is complete; at most `.staging-*` folders are left, which the next
    `write` removes and nobody reads.

    Args:
        folder: Where the checkpoints lie.
        keep: How many stay (None: all). The best one stays beyond that.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(m.group(1)) for m in matches if m)

    def write(self, step: int, fill: Callable[[Path], None], state: dict, best_step: int | None) -> Path:
        """Publish one checkpoint, then delete what exceeds `keep`.

        Args:
            fill: Writes the adapter into the folder it is given.
            state: Written as `state.json` beside it.
            best_step: The checkpoint that must not be deleted.
        """

        def fill_all(staging: Path) -> None:
            fill(staging)
            (staging / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

        final = publish(self.path(step), fill_all)
        self._retain(best_step)
        return final

    def _retain(self, best_step: int | None) -> None:
        steps = self.steps()
        surplus = steps[: -self.keep] if self.keep else []
        for step in surplus:
            if step != best_step:
                _remove(self.path(step))


def publish(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder` appear with everything `fill` writes, or not at all: stage → fill → fsync → rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".staging-*"):
        shutil.rmtree(left)
    staging = folder.parent / f".staging-{folder.name}"
    staging.mkdir()
    fill(staging)
    for file in staging.rglob("*"):
        fsync(file)
    fsync(staging)
    if folder.exists():
        _remove(folder)
    staging.rename(folder)
    fsync(folder.parent)
    return folder


def _remove(folder: Path) -> None:
    """Delete a published folder. Renamed first: a crash among its files must not leave half of it under its name."""
    doomed = folder.parent / f".staging-old-{folder.name}"
    folder.rename(doomed)
    shutil.rmtree(doomed)
