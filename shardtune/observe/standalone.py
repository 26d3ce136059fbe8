"""What does the profiler write with another trainer? The same events and a summary, for reports to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.observe import environment
from shardtune.observe.events import EventLog
from shardtune.observe.hardware import describe_hardware

if TYPE_CHECKING:
    from transformers import TrainerState, TrainingArguments


class StandaloneRun:
    """Opens the events of this rank in `folder` and writes the same events as our own runs, as far as known.

    Args:
        model: Name or folder of the model; empty if unknown.
        meta: The user's own facts; values without a JSON type are written as text.
        script: The training script.
    """

    def __init__(
        self,
        folder: Path,
        args: TrainingArguments,
        *,
        model: str,
        meta: Mapping[str, object],
        script: str | None,
        seq_len: int | None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.is_main = folder, args.process_index == 0
        self.events = EventLog(folder, args.process_index)
        details = {"script": script, "meta": json.loads(json.dumps(dict(meta), default=str)), "seq_len": seq_len}
        self._details = {name: value for name, value in details.items() if value}
        self.events.write(
            "run_start",
            run=folder.resolve().name,
            world_size=args.world_size,
            environment=environment.describe(),
            command=environment.command_line(),
            **{"model": model} if model else {},
            **self._details,
        )
        if args.local_process_index == 0:  # once per node
            self.events.write("hardware", **describe_hardware(folder))

    def log(self, state: TrainerState, logs: Mapping[str, Any]) -> None:
        """A line of the Trainer's log, as a `step` or `eval` event."""
        if "loss" in logs:
            fields = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs}
            self.events.write("step", step=state.global_step, epoch=state.epoch, **fields)
        elif "eval_loss" in logs:
            self.events.write("eval", step=state.global_step, loss=logs["eval_loss"])

    def end(self, step: int, summary: Mapping[str, object]) -> Path | None:
        """Returns the summary's file, which rank 0 writes."""
        self.events.write("run_end", status="done", step=step)
        self.events.close()
        if not self.is_main:
            return None
        path = self.folder / "profile.json"
        path.write_text(json.dumps({**self._details, **summary}, indent=2) + "\n", encoding="utf-8")
        return path
