"""What does a step cost, and what does the time go into? A callback for any Trainer, on a CPU or on GPUs.

    trainer = SFTTrainer(..., callbacks=[profiler := LLMStepProfiler(debug_freq=25, output_dir="runs/one")])
    profiler.attach(trainer)  # only needed if trackers shall get its numbers

What each number counts is written in docs/profiling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback

from shardtune.observe.events import EventLog
from shardtune.observe.standalone import StandaloneRun
from shardtune.observe.watching import TrainingWatch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class LLMStepProfiler(TrainerCallback):
    """Writes a `profile` event for every step on every rank, and a line every `debug_freq` steps on rank 0.

    Alone (with TRL or transformers and nothing else of shardtune) it opens events of its own in `output_dir` and writes
    `profile.json` there when training ends. It never waits for the GPU but once, at the end; what cannot be known is
    absent from the numbers, and said once if one would expect it.

    Args:
        debug_freq: Steps between two lines.
        seq_len: The length sequences are cut or packed to; only written down.
        output_dir: Where a run of its own writes; the Trainer's `output_dir` if not given.
        report_meta: Facts about the run, by name: written into `profile.json` and the `run_start` event of a run of its
            own, and shown at the top of its report.
        script_name: Likewise, the script that trains.
        console: Where lines are printed; quiet on all ranks but 0 if not given.
        events: An open log to write to. Then there is no run of its own.

    Attributes:
        listeners: Called with each profile, as it was written.
    """

    def __init__(
        self,
        debug_freq: int = 25,
        seq_len: int | None = None,
        output_dir: str | Path | None = None,
        report_meta: Mapping[str, object] | None = None,
        script_name: str | None = None,
        *,
        console: Console | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.debug_freq, self.seq_len, self.output_dir = max(1, debug_freq), seq_len, output_dir
        self.report_meta, self.script_name = dict(report_meta or {}), script_name
        self.console, self.events = console, events
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
        self._own: StandaloneRun | None = None
        self.is_attached = False
        self._watching: TrainingWatch | None = None

    def attach(self, trainer: Trainer) -> None:
        """Go before the trackers, which come first in a Trainer, so that the numbers are in the logs they read."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        self.is_attached = True

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self.close()
        assert model is not None
        if self.console is None:
            self.console = Console(quiet=args.process_index != 0)
        if self.events is None:
            folder = Path(self.output_dir or args.output_dir or ".")
            self._own = StandaloneRun(
                folder,
                args,
                model=str(getattr(getattr(model, "config", None), "_name_or_path", "") or ""),
                meta=self.report_meta,
                script=self.script_name,
                seq_len=self.seq_len,
            )
        self._watching = TrainingWatch(self, args, model, getattr(train_dataloader, "dataset", None))
        if args.report_to and not self.is_attached:
            self.say(
                f"{', '.join(args.report_to)} will not get the profiler's numbers: call profiler.attach(trainer) "
                "before trainer.train()."
            )

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watching is not None:
            self._watching.begin_step()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watching is not None:
            self._watching.end_micro_batch()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watching is not None:
            self._watching.begin_optimizer()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watching is not None:
            self._watching.timer.leave()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watching is not None:
            self._watching.end_step(state.global_step)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pause()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pause()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pause()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs is None or self._watching is None:
            return
        if self._own is not None:
            self._own.log(state, logs)
        if "loss" in logs and self.is_attached:  # otherwise only whoever prints the log would get them, and at length
            logs.update(self._watching.numbers_for_trackers())

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._watching is None:
            return
        self._watching.finish()
        if self._own is not None:
            path = self._own.end(state.global_step, self._watching.summary())
            if path is not None:
                self.print_line(f"profile written to {path}")
        self.close()

    def close(self) -> None:
        """Take every hook and tap away. Called when training ends; call it if training was cut short."""
        if self._watching is not None:
            self._watching.close()
            self._watching = self._own = None

    def write(self, event: str, **fields: object) -> None:
        log = self._own.events if self._own is not None else self.events
        assert log is not None
        log.write(event, **fields)

    def say(self, text: str) -> None:
        """What one would expect and will not find, once."""
        self.print_line(f"profiler: {text}")
        self.write("notice", about="profiler", text=text)

    def print_line(self, text: str) -> None:
        """On a line of its own, though the Trainer's bar stands where the cursor is: it is drawn again below."""
        assert self.console is not None
        if not self.console.quiet:
            with tqdm.external_write_mode(file=self.console.file):
                self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _pause(self) -> None:
        if self._watching is not None:
            self._watching.timer.pause()
