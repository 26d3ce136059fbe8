"""What does a step cost, and where does the time go? A callback for any Trainer, on a CPU or on GPUs.

    trainer = SFTTrainer(..., callbacks=[profiler := LLMStepProfiler(debug_freq=25, output_dir="runs/one")])
    profiler.attach(trainer)  # only needed to send its numbers to trackers

What each number counts is written in docs/profiling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback

from shardtune.observe.events import EventLog
from shardtune.observe.profiler_session import ProfilerSession
from shardtune.observe.standalone import StandaloneRun

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class LLMStepProfiler(TrainerCallback):
    """Writes a `profile` event for every step on every rank, and a line every `debug_freq` steps on rank 0.

    Standalone (with TRL or transformers and nothing else of shardtune) it writes its own events to `output_dir`, and
    `profile.json` when training ends. It synchronizes with the GPU only once, at the end; what is not known is absent
    from the numbers, and reported once if one would expect it.

    Args:
        debug_freq: Steps between two lines.
        seq_len: The length to which sequences are truncated or packed; only recorded.
        output_dir: Where a standalone run writes; default: the Trainer's `output_dir`.
        report_meta: Facts about the run, by name: written into `profile.json` and the `run_start` event of a
            standalone run, and shown at the top of its report.
        script_name: Likewise, the training script.
        console: Where lines are printed; default: quiet on all ranks but 0.
        events: An open log to write to. Then it is not standalone.

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
        self.recomputes_layers: bool | None = None  # None: as the Trainer's arguments say
        self.nodes: Sequence[int] | None = None  # of every rank; None: ranks ask each other
        self._session: ProfilerSession | None = None

    def attach(self, trainer: Trainer) -> None:
        """Move this callback before the trackers, so that its numbers are in the logs they read."""
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
        self._session = ProfilerSession(self, args, model, getattr(train_dataloader, "dataset", None))
        if args.report_to and not self.is_attached:
            self.say(
                f"{', '.join(args.report_to)} will not get the profiler's numbers: call profiler.attach(trainer) "
                "before trainer.train()."
            )

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._session is not None:
            self._session.begin_step()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._session is not None:
            self._session.end_micro_batch()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._session is not None:
            self._session.begin_optimizer()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._session is not None:
            self._session.timer.leave()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._session is not None:
            self._session.end_step(state.global_step)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pause()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pause()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pause()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs is None or self._session is None:
            return
        if self._own is not None:
            self._own.log(state, logs)
        if "loss" in logs and self.is_attached:  # otherwise they would only clutter the printed log
            logs.update(self._session.numbers_for_trackers())

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._session is None:
            return
        self._session.finish()
        if self._own is not None:
            path = self._own.end(state.global_step, self._session.summary())
            if path is not None:
                self.print_line(f"profile written to {path}")
        self.close()

    def close(self) -> None:
        """Remove every hook. Called when training ends; call it yourself if training was interrupted."""
        if self._session is not None:
            self._session.close()
            self._session = self._own = None

    def write(self, event: str, **fields: object) -> None:
        log = self._own.events if self._own is not None else self.events
        assert log is not None
        log.write(event, **fields)

    def say(self, text: str) -> None:
        """Print and record, once, what is not measured and why."""
        self.print_line(f"profiler: {text}")
        self.write("notice", about="profiler", text=text)

    def print_line(self, text: str) -> None:
        """Print a line above the Trainer's progress bar."""
        assert self.console is not None
        if not self.console.quiet:
            with tqdm.external_write_mode(file=self.console.file):
                self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _pause(self) -> None:
        if self._session is not None:
            self._session.pause()
