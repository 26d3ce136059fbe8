"""How is it going? A line for every log step, and a live bar on a terminal; the same numbers go into the events."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from shardtune.observe.events import EventLog
from shardtune.observe.progress_bar import NarrowProgress
from shardtune.terminal import clock, percent, width_of, wrapped

if TYPE_CHECKING:
    from transformers import TrainerState

_WIDE = 110  # columns


class ProgressLines:
    """Prints steps, loss, tokens/s and time left on rank 0, and writes `step` and `eval` events on every rank.

    Tokens/s counts real tokens (no padding) of all ranks over wall time between two log lines, without the time spent
    evaluating and saving. Time left counts everything: the average step so far, times the steps that remain.

    Args:
        console: A quiet one on all ranks but 0.
    """

    def __init__(self, console: Console, events: EventLog) -> None:
        self.console, self.events = console, events
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._began, self._first_step = 0.0, 0
        self._mark = (0.0, 0.0, 0)  # clock, paused seconds, tokens at the last log line

    def begin(self, state: TrainerState, tokens: int, paused: float) -> None:
        """Args:
        tokens: Trained on before a resume: neither rate nor time left counts what an earlier process did.
        paused: Seconds spent evaluating and saving so far.
        """
        self._began, self._first_step = time.perf_counter(), state.global_step
        self._mark = (self._began, paused, tokens)
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

    def end_step(self, state: TrainerState) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step)

    def eval_line(
        self, state: TrainerState, logs: dict[str, float], groups: dict[str, list[float]] | None = None
    ) -> None:
        """Args:
        groups: The means of parts of the rows (`Validation.groups`), for the event.
        """
        accuracy = logs["eval_mean_token_accuracy"]
        self.events.write(
            "eval", step=state.global_step, loss=logs["eval_loss"], tokens=logs["eval_tokens"],
            entropy=logs["eval_entropy"], token_accuracy=accuracy, **({"groups": groups} if groups else {}),
        )  # fmt: skip
        more = self._if_wide(f"  token accuracy {percent(accuracy)}  entropy {logs['eval_entropy']:.3f}")
        self._print(f"step {state.global_step}/{state.max_steps}  eval loss {_loss(logs['eval_loss'])}{more}")

    def train_line(self, state: TrainerState, logs: dict[str, float], paused: float) -> None:
        now, tokens = time.perf_counter(), int(logs["num_tokens"])
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
            learning_rate=logs["learning_rate"],
            entropy=logs["entropy"],
            token_accuracy=logs["mean_token_accuracy"],
            tokens=tokens,
            tokens_per_second=round(rate, 1),
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step, left=f"{clock(left)} left")
        grad = f"  grad {logs['grad_norm']:.3f}" if "grad_norm" in logs else ""
        more = self._if_wide(f"  acc {percent(logs['mean_token_accuracy'])}  entropy {logs['entropy']:.3f}")
        self._print(
            f"step {state.global_step}/{state.max_steps}  loss {_loss(logs['loss'])}{more}{grad}"
            f"  lr {logs['learning_rate']:.2e}  {rate:,.0f} tok/s  {clock(left)} left"
        )

    def close(self) -> None:
        """End the live bar, also when training was interrupted."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _if_wide(self, text: str) -> str:
        """What a terminal of 80 columns has no room for; the events and a log file have it in any case."""
        width = width_of(self.console)
        return text if width is None or width >= _WIDE else ""

    def _print(self, line: str) -> None:
        fitting = wrapped(line, width_of(self.console), 2)
        self.console.print(fitting, highlight=False, markup=False, soft_wrap=True)


def _loss(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4f}"
