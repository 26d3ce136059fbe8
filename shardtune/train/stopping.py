"""Is there time to stop? Compares the longest step and save so far with the grace a scheduler gives."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from transformers import TrainerCallback

from shardtune.observe.events import EventLog
from shardtune.train.interrupt import Grace

if TYPE_CHECKING:
    from transformers import TrainerControl


class GraceWatch(TrainerCallback):
    """Times steps and saves, and warns once when the grace is shorter than one of each."""

    def __init__(self, grace: Grace, console: Console, events: EventLog) -> None:
        self.grace, self.console, self.events = grace, console, events
        self._mark = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._mark = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        now = time.monotonic()
        if state.global_step > 1:  # the first one compiles, and is over when anybody may be preempted
            self.grace.step = max(self.grace.step, now - self._mark)
        self._mark = now

    def on_log(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._mark = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._mark = time.monotonic()

    def on_save(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Called right after the save: what lies between is the save itself."""
        self.note_save(time.monotonic() - self._mark)
        self._mark = time.monotonic()

    def note_save(self, seconds: float) -> None:
        self.grace.save = max(self.grace.save, seconds)
        if text := self.grace.warning():
            self.console.print(f"[yellow]warning[/] {escape(text)}", highlight=False, soft_wrap=True)
            self.events.write("warning", about="grace", text=text)
