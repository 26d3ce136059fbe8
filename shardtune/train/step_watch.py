"""What do the Trainer's callbacks know about time? What the loop is doing now, and how long steps and saves take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import TrainerCallback

from shardtune.observe.events import EventLog
from shardtune.run.stop_request import Grace
from shardtune.terminal import warn
from shardtune.train.watchdog import BATCH, ENDING, EVALUATING, SAVING, STEP, Watchdog

if TYPE_CHECKING:
    from transformers import TrainerControl


class ProgressWatch(TrainerCallback):
    """Tells the watchdog what the Trainer's loop is about to do. Comes last, when the other callbacks have decided."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watchdog.enter(BATCH, state.global_step + 1)

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watchdog.enter(STEP, state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watchdog.beat()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._next(state, control, evaluate=control.should_evaluate)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._next(state, control, evaluate=control.should_evaluate)

    def on_prediction_step(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watchdog.enter(EVALUATING, state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._next(state, control, evaluate=False)

    def on_save(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watchdog.enter(BATCH, state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.watchdog.enter(ENDING)

    def _next(self, state: Any, control: TrainerControl, evaluate: bool) -> None:
        if evaluate:
            self.watchdog.enter(EVALUATING, state.global_step)
        elif control.should_save:
            self.watchdog.enter(SAVING, state.global_step)
        else:
            self.watchdog.enter(BATCH, state.global_step + 1)


class GraceWatch(TrainerCallback):
    """Times steps, asks how long saves take, and warns once when the grace is shorter than one of each."""

    def __init__(self, grace: Grace, longest_save: Callable[[], float], console: Console, events: EventLog) -> None:
        self.grace, self.longest_save, self.console, self.events = grace, longest_save, console, events
        self._began = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if state.global_step > 1:  # the first one compiles, and is over when anybody may be preempted
            self.grace.step = max(self.grace.step, time.monotonic() - self._began)
        self.grace.save = self.longest_save()
        if text := self.grace.warning():
            warn(self.console, self.events, "grace", text)
