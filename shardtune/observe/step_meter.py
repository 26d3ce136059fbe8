"""How long does a step of a user's script take, and how much of it waits for data? On a GPU without synchronizing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from shardtune.observe.clocks import Clock, CudaClock, HostClock, Mark
from shardtune.observe.gpu_meter import GpuMeter
from shardtune.observe.host_meter import HostMeter
from shardtune.observe.phases import StepSpans, StepTimer
from shardtune.observe.profiler_session import gpu_memory

Batch = TypeVar("Batch")
_MOST_PENDING = 256  # steps the GPU may be behind


class StepMeter:
    """Calls `done` with the profile of each step, as soon as the GPU has passed its end."""

    def __init__(self, done: Callable[[dict[str, Any]], None]) -> None:
        self._done = done
        self._device = torch.device("cpu")
        self._gpu: GpuMeter | None = None
        self._clock: Clock = HostClock()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._clock = CudaClock()
            self._gpu = GpuMeter(torch.cuda.current_device())
            self._gpu.open()
        self._timer = StepTimer(self._clock)
        self._host = HostMeter()
        self._samples: int | None = None
        self._unit = ""
        self._pending: deque[tuple[StepSpans, list[tuple[Mark, Mark]], dict[str, Any]]] = deque()
        self._aside: list[tuple[Mark, Mark]] = []  # spans of the current step that do not count

    def fetch(self, source: Iterator[Batch]) -> Batch:
        """The next batch; the wait for it counts as data."""
        self._timer.begin_if_new()
        begin = self._clock.mark()
        batch = next(source)
        self._timer.now.add("data", begin, self._clock.mark())
        return batch

    def add_samples(self, count: int, unit: str) -> None:
        self._samples, self._unit = (self._samples or 0) + int(count), unit

    def end_step(self, number: int) -> None:
        facts: dict[str, Any] = {"step": number, "host": self._host.read()}
        if self._samples is not None:
            facts |= {"samples": self._samples, "sample_unit": self._unit}
        if self._device.type == "cuda":
            facts["memory"] = gpu_memory(self._device)
        if self._gpu is not None and self._gpu.latest:
            facts["gpu"] = self._gpu.latest
        self._samples = None
        self._pending.append((self._timer.finish(), self._aside, facts))
        self._aside = []
        if len(self._pending) > _MOST_PENDING:
            self._clock.wait_for(self._pending[0][0].end)
        self._read_what_is_passed()

    def pause(self) -> None:
        """What follows, and what was done since the last step, belongs to no step."""
        self._timer.pause()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done inside does not count, although a step is under way."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._aside.append((begin, self._clock.mark()))

    def finish(self) -> None:
        if self._pending:
            self._clock.wait_for(self._pending[-1][0].end)
        self._read_what_is_passed()
        if self._gpu is not None:
            self._gpu.close()

    def _read_what_is_passed(self) -> None:
        while self._pending and self._clock.is_passed(self._pending[0][0].end):
            spans, aside, facts = self._pending.popleft()
            seconds = spans.seconds(self._clock)
            seconds["step"] -= sum(self._clock.seconds(begin, end) for begin, end in aside)
            self._clock.recycle([mark for span in aside for mark in span])
            if "samples" in facts:
                facts["samples_per_second"] = round(facts["samples"] / max(seconds["step"], 1e-9), 2)
            spans.recycle_marks(self._clock)
            self._done({"seconds": {name: round(value, 6) for name, value in seconds.items()}, **facts})
