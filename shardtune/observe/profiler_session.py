"""What is measured during one training? Hooks and meters from its start to its end, and a profile of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardtune.observe.batches import BatchCount, count_batch
from shardtune.observe.chips import peak_tflops
from shardtune.observe.clocks import Clock, CudaClock, HostClock, Mark
from shardtune.observe.collectives import CollectiveTap
from shardtune.observe.compile_counter import CompileCounter
from shardtune.observe.dataloader_tap import DataLoaderTap
from shardtune.observe.flop_recorder import FlopRecorder
from shardtune.observe.flops import FlopFormula
from shardtune.observe.gpu_meter import GpuMeter
from shardtune.observe.host_meter import HostMeter
from shardtune.observe.passes import PassHooks
from shardtune.observe.phases import StepSpans, StepTimer
from shardtune.observe.profile_window import ProfileWindow, profile_line, summary_of, tracker_numbers
from shardtune.observe.traffic import TrafficCounter, nodes_of_ranks

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from shardtune.observe.profiler import LLMStepProfiler

_QUEUE = 4096  # batches a loader may prefetch before the oldest are forgotten


@dataclass
class _Step:
    """A step that has ended on the host, and perhaps not yet on the GPU."""

    number: int
    spans: StepSpans
    batches: list[BatchCount | None]
    facts: dict[str, object] = field(default_factory=dict)  # what was read when it ended: memory, host, gpu


class ProfilerSession:
    """Profiling of one training: its hooks, and the steps whose marks the GPU has not passed yet."""

    def __init__(self, profiler: LLMStepProfiler, args: TrainingArguments, model: nn.Module, dataset: object) -> None:
        self.profiler, self.model = profiler, model
        self.on_cuda = args.device.type == "cuda"
        self.clock: Clock = CudaClock() if self.on_cuda else HostClock()
        self.timer = StepTimer(self.clock)
        self.device = args.device
        self.in_step = False
        self._has_begun = False
        self.steps = 0
        self._pending: deque[_Step] = deque()
        self._fetched: deque[BatchCount | None] = deque(maxlen=_QUEUE)
        self._used: list[BatchCount | None] = []
        self._after_fetch: Mark | None = None
        self._counts_tokens = args.world_size > 1 and bool(args.average_tokens_across_devices)
        self._accumulation = args.gradient_accumulation_steps
        self.fetch_tap = DataLoaderTap(dataset, self.clock, self.timer.begin_if_new, self._on_fetched)
        self.fetch_tap.open()
        self.collectives = CollectiveTap(model, self._wait, on_cuda=self.on_cuda) if args.world_size > 1 else None
        self.traffic: TrafficCounter | None = None
        if self.collectives is not None and self.collectives.is_open:
            nodes = profiler.nodes if profiler.nodes is not None else nodes_of_ranks(args.device)
            self.traffic = TrafficCounter(model, nodes, lambda: self.timer.is_running)
        self.passes = PassHooks(model, self.timer, lambda: self.in_step, self._on_micro_batch)
        self.recorder: FlopRecorder | None = None
        recomputes = profiler.recomputes_layers
        self._recomputed = bool(args.gradient_checkpointing) if recomputes is None else recomputes
        self._formula: FlopFormula | None = None
        self.compiling = CompileCounter(profiler.say)
        self.host = HostMeter()
        self.gpu: GpuMeter | None = None
        self.peak: float | None = None
        if self.on_cuda:
            self.peak = peak_tflops(torch.cuda.get_device_name(args.device))
            self.gpu = GpuMeter(args.device.index if args.device.index is not None else torch.cuda.current_device())
            self.gpu.open()
        self._since_line, self._since_log, self._all = ProfileWindow(), ProfileWindow(), ProfileWindow()
        self._lines = 0
        self._report_missing_measurements()

    def _report_missing_measurements(self) -> None:
        if not self.fetch_tap.is_open:
            self.profiler.say("data time and tokens are not measured: batches do not come from a torch DataLoader.")
        if self.collectives is not None and not self.collectives.is_open:
            why_not = self.collectives.why_not
            self.profiler.say(f"time waiting for other ranks and bytes sent to them are not measured: {why_not}.")
        if self.gpu is not None and self.gpu.why_not is not None:
            self.profiler.say(f"GPU utilization, clock, power and temperature are not measured: {self.gpu.why_not}.")

    def begin_step(self) -> None:
        if not self._has_begun:
            self.recorder = FlopRecorder(self.model, self._recomputed)
            self._has_begun = True
        while len(self._fetched) > self._accumulation + 1:
            self._fetched.popleft()  # skipped on resume
        self.timer.begin_if_new()
        if self._after_fetch is not None:
            if self._counts_tokens and self.collectives is not None and self.collectives.is_open:
                # Since the last batch was fetched, the ranks have only exchanged their token counts.
                self.timer.now.add("collective", self._after_fetch, self.clock.mark())
            else:
                self.clock.recycle([self._after_fetch])
            self._after_fetch = None
        self._used = []
        self.compiling.begin_step()
        self.in_step = True

    def end_micro_batch(self) -> None:
        self.timer.drop()
        self._take_formula()

    def begin_optimizer(self) -> None:
        if self.timer.phase != "optimizer":  # the end of the backward pass was not seen
            self.timer.enter("optimizer")
        self._take_formula()

    def _take_formula(self) -> None:
        if self.recorder is None or not self.recorder.is_complete:
            return
        self.recorder.close()
        self._formula, self.recorder = self.recorder.formula(), None
        if self._formula is None:
            self.profiler.say("TFLOP/s and MFU are not measured: no attention module with known head width.")

    def end_step(self, number: int) -> None:
        self.in_step = False
        if self.collectives is not None and self.collectives.is_open:
            self.timer.now.known.add("collective")
        facts: dict[str, object] = {"host": self.host.read()}
        if compiled := self.compiling.end_step(number):
            facts["compiled"] = compiled
        if self.traffic is not None:
            facts |= self.traffic.take()
        if self.on_cuda:
            facts["memory"] = gpu_memory(self.device)
        if self.gpu is not None and self.gpu.latest:
            facts["gpu"] = self.gpu.latest
        self._pending.append(_Step(number, self.timer.finish(), self._used, facts))
        self._used = []
        self._read_what_is_passed()

    def pause(self) -> None:
        """What follows, and what was done since the last step, belongs to no step: evaluating, saving."""
        self.timer.pause()
        if self.traffic is not None:
            self.traffic.drop()

    def finish(self) -> None:
        if self._pending:
            self.clock.wait_for(self._pending[-1].spans.end)
        self._read_what_is_passed()
        if len(self._since_line) and not self._lines:
            self._print_line()

    def close(self) -> None:
        self.fetch_tap.close()
        self.passes.close()
        for part in (self.collectives, self.traffic, self.recorder, self.gpu):
            if part is not None:
                part.close()

    def numbers_for_trackers(self) -> dict[str, float]:
        window = self._since_log
        if len(window):
            self._since_log = ProfileWindow()
            return tracker_numbers(window)
        return {}

    def summary(self) -> dict[str, object]:
        return summary_of(self._all, self.steps)

    def _on_fetched(self, batch: object, begin: Mark, end: Mark) -> None:
        self.timer.now.add("data", begin, end)
        self._fetched.append(count_batch(batch))
        if self._after_fetch is not None:
            self.clock.recycle([self._after_fetch])
        self._after_fetch = self.clock.mark()

    def _on_micro_batch(self, shape: tuple[int, ...] | None) -> None:
        """A batch that was fetched reaches the model. Loaders fetch ahead, and in order."""
        while self._fetched:
            count = self._fetched.popleft()
            if count is None or shape is None or count.shape == shape:
                self._used.append(count)
                return
        self._used.append(None)

    def _wait(self, run: Callable[[], Any]) -> Any:
        if not self.in_step:
            return run()
        begin = self.clock.mark()
        result = run()
        self.timer.now.add("collective", begin, self.clock.mark(), within=self.timer.phase)
        return result

    def _read_what_is_passed(self) -> None:
        while self._pending and self.clock.is_passed(self._pending[0].spans.end):
            step = self._pending.popleft()
            profile = self._profile(step)
            step.spans.recycle_marks(self.clock)
            self.steps += 1
            self.profiler.write("profile", **profile)
            for window in (self._since_line, self._since_log, self._all):
                window.add(profile)
            for listener in self.profiler.listeners:
                listener(profile)
            if step.number % self.profiler.debug_freq == 0:
                self._print_line()

    def _profile(self, step: _Step) -> dict[str, Any]:
        seconds = step.spans.seconds(self.clock)
        profile: dict[str, Any] = {"step": step.number, "seconds": {name: round(s, 6) for name, s in seconds.items()}}
        batches = [batch for batch in step.batches if batch is not None]
        if batches and len(batches) == len(step.batches):
            real = sum(batch.real for batch in batches)
            profile["tokens"] = {
                "supervised": sum(batch.supervised for batch in batches),
                "real": real,
                "padded": sum(batch.padded for batch in batches),
            }
            profile["tokens_per_second"] = round(_per_second(real, seconds["step"]), 1)
            if self._formula is not None:
                profile |= self._speed(self._formula, batches, seconds["step"])
        return profile | step.facts

    def _speed(self, formula: FlopFormula, batches: list[BatchCount], seconds: float) -> dict[str, float]:
        tflops = _per_second(sum(formula.needed(batch) for batch in batches), seconds) / 1e12
        executed = _per_second(sum(formula.executed(batch) for batch in batches), seconds) / 1e12
        speed = {"tflops": _digits(tflops), "hardware_tflops": _digits(executed)}
        if self.peak is not None:
            speed |= {"mfu": round(tflops / self.peak, 4), "hfu": round(executed / self.peak, 4)}
        return speed

    def _print_line(self) -> None:
        console = self.profiler.console
        assert console is not None
        self.profiler.print_line(profile_line(self._since_line, console.width if console.is_terminal else None))
        self._since_line.clear()
        self._lines += 1


def gpu_memory(device: torch.device) -> dict[str, int]:
    # Nested: the flat form of the same numbers takes ten times as long to build.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return {"allocated": allocated["current"], "reserved": reserved["current"], "peak": allocated["peak"]}


def _per_second(amount: float, seconds: float) -> float:
    return amount / max(seconds, 1e-9)


def _digits(value: float) -> float:
    """Four significant digits, since a toy model has a billionth of a GPU's FLOP/s."""
    return float(f"{value:.4g}")
