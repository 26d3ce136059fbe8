"""How is it going? A line for every log step, and a live bar on a terminal; the same numbers go into the events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from transformers import TrainerCallback

from shardtune.observe.events import EventLog
from shardtune.observe.progress_bar import NarrowProgress
from shardtune.terminal import clock, width_of, wrapped

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class ProgressCallback(TrainerCallback):
    """Prints steps, loss, tokens/s and time left on rank 0, and writes `step` and `eval` events on every rank.

    Tokens/s counts real tokens (no padding) of all ranks over wall time between two log lines, without the time spent
    evaluating and saving. Time left counts everything: the average step so far, times the steps that remain.

    Args:
        console: A quiet one on all ranks but 0.
        paused: Returns the seconds spent evaluating and saving so far.

    Attributes:
        tokens_before: Trained on before the run was resumed; neither rate nor time left counts them.
    """

    def __init__(self, console: Console, events: EventLog, paused: Callable[[], float] = lambda: 0.0) -> None:
        self.console, self.events, self.paused = console, events, paused
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self.tokens_before = 0
        self._began, self._first_step = 0.0, 0
        self._mark = (0.0, 0.0, 0)  # clock, paused seconds, tokens at the last log line

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began, self._first_step = time.perf_counter(), state.global_step
        self._mark = (self._began, self.paused(), self.tokens_before)
        if self.console.is_terminal and not self.console.quiet:
            self._bar = NarrowProgress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                console=self.console,
                expand=True,
                transient=True,  # what is worth keeping was printed as lines
            )
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, left="first step")
            self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step)
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last step is always logged, whatever logging_steps divides

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **_: Any,
    ) -> None:
        if not logs:
            return
        if "loss" in logs:
            self._on_train_line(state, logs)
        elif "eval_loss" in logs:
            self.events.write("eval", step=state.global_step, loss=logs["eval_loss"], tokens=logs.get("eval_tokens"))
            self._print(f"step {state.global_step}/{state.max_steps}  eval loss {_loss(logs['eval_loss'])}")

    def _on_train_line(self, state: TrainerState, logs: dict) -> None:
        now, paused, tokens = time.perf_counter(), self.paused(), int(logs.get("num_tokens") or 0)
        was_now, was_paused, was_tokens = self._mark
        seconds = max(1e-9, (now - was_now) - (paused - was_paused))
        self._mark = (now, paused, tokens)
        rate = (tokens - was_tokens) / seconds
        done = max(1, state.global_step - self._first_step)
        left = (now - self._began) / done * (state.max_steps - state.global_step)
        self.events.write(
            "step",
            step=state.global_step,
            epoch=state.epoch,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            tokens=tokens,
            tokens_per_second=round(rate, 1),
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step, left=f"{clock(left)} left")
        grad = f"  grad {logs['grad_norm']:.3f}" if "grad_norm" in logs else ""
        self._print(
            f"step {state.global_step}/{state.max_steps}  loss {_loss(logs['loss'])}{grad}"
            f"  lr {logs.get('learning_rate', 0):.2e}  {rate:,.0f} tok/s  {clock(left)} left"
        )

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the live bar, also when training was interrupted."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        fitting = wrapped(line, width_of(self.console), 2)
        self.console.print(fitting, highlight=False, markup=False, soft_wrap=True)


def _loss(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4f}"
