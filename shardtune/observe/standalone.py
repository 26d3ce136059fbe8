"""What does a run of somebody else's trainer leave behind? The same events and a summary, for reports to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.observe import environment
from shardtune.observe.events import EventLog

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


class StandaloneRun:
    """Opens the events of this rank in `folder` and writes what our own runs write there, as far as it is known.

    Args:
        meta: Whatever its owner wants to find again, in words JSON knows.
        script: The program that trains.
    """

    def __init__(
        self, folder: Path, args: TrainingArguments, meta: Mapping[str, object], script: str | None, seq_len: int | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.is_main = folder, args.process_index == 0
        self.events = EventLog(folder, args.process_index)
        given = {"meta": dict(meta), "script": script, "seq_len": seq_len}
        self.events.write(
            "run_start",
            run=folder.name,
            world_size=args.world_size,
            environment=environment.describe(),
            **{name: value for name, value in given.items() if value},
        )

    def log(self, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """A line of the Trainer's log, as a `step` or `eval` event."""
        if "loss" in logs:
            told = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs}
            self.events.write("step", step=state.global_step, epoch=state.epoch, **told)
        elif "eval_loss" in logs:
            self.events.write("eval", step=state.global_step, loss=logs["eval_loss"])

    def end(self, step: int, summary: Mapping[str, object]) -> Path | None:
        """Returns the summary's file, which rank 0 writes."""
        self.events.write("run_end", status="done", step=step)
        self.events.close()
        if not self.is_main:
            return None
        path = self.folder / "profile.json"
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return path
