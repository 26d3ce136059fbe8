"""What does a step cost? Every `debug_freq` steps: time of a step, and the most memory any rank has held."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from shardtune.observe.events import EventLog
from shardtune.observe.summary import size

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState


class StepProfile(TrainerCallback):
    """Writes a `profile` event on every rank and a line on rank 0.

    A step is counted from its first forward pass to the end of the optimizer step (waiting for data is not in it). On
    CUDA the host runs ahead of the device, so a single step's time is only right on average; the median is shown.

    Args:
        every: `train.debug_freq`.
    """

    def __init__(self, console: Console, events: EventLog, every: int) -> None:
        self.console, self.events, self.every = console, events, every
        self._began = 0.0
        self._seconds: list[float] = []

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        if state.global_step % self.every:
            return
        median = statistics.median(self._seconds)
        host, device = host_peak_bytes(), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        self.events.write(
            "profile",
            step=state.global_step,
            step_seconds=round(median, 4),
            host_peak_bytes=host,
            gpu_peak_bytes=device,
        )
        told = f"profile at step {state.global_step}: {median:.3f} s a step (median of {len(self._seconds)})"
        told += f", host memory peak {size(host)}" + (f", GPU memory peak {size(device)}" if device is not None else "")
        self.console.print(told, highlight=False, soft_wrap=True)
        self._seconds.clear()


def host_peak_bytes() -> int:
    """Most memory this process has held so far (resident set)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
