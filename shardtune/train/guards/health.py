"""Are the ranks and their machines healthy? Checked every few steps, compared across ranks in one exchange."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardtune.config.schema import GuardsSection
from shardtune.parallel.processes import Processes
from shardtune.train.guards.alarm import Alarm
from shardtune.train.guards.machine import Gpu
from shardtune.train.guards.pace import OwnForward
from shardtune.train.proof import checksum

if TYPE_CHECKING:
    from shardtune.train.loop import TrainingLoop

_IN_A_ROW = 3  # checks at which the same rank is the slowest before it is called a straggler
_MIN_EXCESS = 0.01  # seconds per step a straggler costs at least; milliseconds are noise
_MIN_WAIT = 0.05  # seconds per step of waiting for data; less does not matter


@dataclass(frozen=True)
class RankHealth:
    """What one rank measured since its last check. None: not known here."""

    host: str
    forward: float | None  # own seconds per token
    tokens: int
    waited: float | None  # share of the time
    waited_seconds: float  # per step
    memory: float | None  # peak share of the GPU's memory
    throttle: list[str]
    adapters: int  # checksum


class HealthChecks:
    """Every `every` steps: stragglers, data starvation, memory, throttling, adapters that do not change."""

    def __init__(self, settings: GuardsSection, processes: Processes, gpu: Gpu | None, every: int) -> None:
        self.settings, self.processes, self.gpu, self.every = settings, processes, gpu, every
        self.forward = OwnForward(processes.device)
        self._slow: tuple[int, int] = (-1, 0)  # the slowest rank of the last checks, and of how many
        self._adapters: int | None = None  # checksum over all ranks at the last check; same on any number of ranks
        self._moving = False  # a step since then should have changed them
        self._mark: tuple[float, float, int] | None = None  # clock without pauses, seconds waited, step
        self._loop: TrainingLoop | None = None

    def attach(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self.forward.watch(loop.model)

    def begin(self) -> None:
        """A loop begins, with a clock of its own."""
        self._mark = None

    def begin_step(self, step: int) -> None:
        if step % self.every == 0:
            self.forward.arm()

    def end_step(self, step: int, moving: bool) -> list[Alarm]:
        """A collective on the steps of a check. `moving`: this step should have changed the adapters."""
        self._moving = self._moving or moving
        if self._mark is None:  # after the first step: starting the data loaders does not count as starvation
            self._mark = self._clock(step)
        if step % self.every:
            return []
        ranks = [RankHealth(**rank) for rank in self.processes.all_gather(asdict(self._measure(step)))]
        alarms = (self._straggler(step, ranks), self._starved(step, ranks), self._full(step, ranks),
                  self._throttled(step, ranks), self._frozen(step, ranks))  # fmt: skip
        self._adapters, self._moving = sum(rank.adapters for rank in ranks), False
        self._mark = self._clock(step)
        return [alarm for alarm in alarms if alarm is not None and getattr(self.settings, alarm.guard) != "off"]

    def _clock(self, step: int) -> tuple[float, float, int]:
        assert self._loop is not None
        return time.perf_counter() - self._loop.paused_seconds, self._loop.data_seconds, step

    def _measure(self, step: int) -> RankHealth:
        assert self._loop is not None and self._mark is not None
        now, began = self._clock(step), self._mark
        waited, steps = now[1] - began[1], now[2] - began[2]
        used, capacity = self.gpu.memory() if self.gpu is not None else (0, 0)
        return RankHealth(
            host=socket.gethostname(),
            forward=self.forward.seconds_per_token(),
            tokens=self.forward.tokens,
            waited=waited / max(1e-9, now[0] - began[0]) if steps else None,
            waited_seconds=waited / max(1, steps),
            memory=used / capacity if capacity else None,
            throttle=list(self.gpu.throttle()) if self.gpu is not None else [],
            adapters=_adapters_checksum(self._loop.model) if self.settings.frozen_adapter != "off" else 0,
        )

    def _straggler(self, step: int, health: list[RankHealth]) -> Alarm | None:
        paces = [rank.forward for rank in health if rank.forward is not None]
        if len(paces) < 2 or len(paces) < len(health):
            return None
        slow = max(range(len(paces)), key=paces.__getitem__)
        others = statistics.median([pace for rank, pace in enumerate(paces) if rank != slow])
        limit = others * self.settings.straggler_ratio
        if paces[slow] <= limit or (paces[slow] - others) * health[slow].tokens < _MIN_EXCESS:
            self._slow = (-1, 0)
            return None
        self._slow = (slow, self._slow[1] + 1 if self._slow[0] == slow else 1)
        if self._slow[1] < _IN_A_ROW:
            return None
        return Alarm(
            "straggler", step, f"Rank {slow} on {health[slow].host} is slow: its own forward pass takes "
            f"{paces[slow] / others:.1f} times as long per token as the other ranks'; every rank waits for it.",
            value=paces[slow] / others, limit=self.settings.straggler_ratio, ranks=(slow,),
            fix="Check that machine: other jobs, clock speeds, temperature, a GPU in a slower power mode.",
        )  # fmt: skip

    def _starved(self, step: int, health: list[RankHealth]) -> Alarm | None:
        limit = self.settings.data_starvation_share
        ranks = tuple(
            rank for rank, its in enumerate(health)
            if its.waited is not None and its.waited > limit and its.waited_seconds > _MIN_WAIT
        )  # fmt: skip
        if not ranks:
            return None
        most = max(health[rank].waited or 0.0 for rank in ranks)
        return Alarm(
            "data_starvation", step, f"{_named(ranks, health)} spent {most:.0%} of the time waiting for data.",
            value=most, limit=limit, ranks=ranks,
            fix="Set train.dataloader_num_workers (for example 2), or put the prepared data on a faster disk.",
        )  # fmt: skip

    def _full(self, step: int, health: list[RankHealth]) -> Alarm | None:
        limit = self.settings.memory_share
        ranks = tuple(rank for rank, its in enumerate(health) if its.memory is not None and its.memory > limit)
        if not ranks:
            return None
        most = max(health[rank].memory or 0.0 for rank in ranks)
        return Alarm(
            "memory", step, f"The GPU of {_named(ranks, health).lower()} peaked at {most:.1%} of its memory: a longer "
            "row may not fit.", value=most, limit=limit, ranks=ranks,
            fix="Halve train.per_device_train_batch_size and double train.gradient_accumulation_steps.",
        )  # fmt: skip

    def _throttled(self, step: int, health: list[RankHealth]) -> Alarm | None:
        ranks = tuple(rank for rank, its in enumerate(health) if its.throttle)
        if not ranks:
            return None
        reasons = sorted({reason for rank in ranks for reason in health[rank].throttle})
        text = f"The GPU of {_named(ranks, health).lower()} is throttling: {', '.join(reasons)}."
        fix = "Check its cooling and power supply; training continues, but slower."
        return Alarm("throttling", step, text, ranks=ranks, fix=fix)

    def _frozen(self, step: int, health: list[RankHealth]) -> Alarm | None:
        same = self._adapters == sum(rank.adapters for rank in health)
        if not same or not self._moving:
            return None
        return Alarm(
            "frozen_adapter", step, f"No adapter weight has changed in the last {self.every} steps, although the "
            "learning rate is not zero.",
            fix="Raise train.learning_rate; a gradient norm of zero means that no token is supervised.",
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"slow": list(self._slow), "adapters": self._adapters, "moving": self._moving}

    def restore(self, saved: dict[str, Any]) -> None:
        self._slow = (saved["slow"][0], saved["slow"][1])
        self._adapters, self._moving = saved["adapters"], saved["moving"]


def _named(ranks: tuple[int, ...], health: list[RankHealth]) -> str:
    hosts = ", ".join(sorted({health[rank].host for rank in ranks}))
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({hosts})"


def _adapters_checksum(model: torch.nn.Module) -> int:
    return sum(checksum(parameter) for parameter in model.parameters() if parameter.requires_grad)
