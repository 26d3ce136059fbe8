"""How do the ranks and their machines do? A look every so many steps, compared across ranks in one exchange."""

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
    from shardtune.train.trainer import ShardedSFTTrainer

_IN_A_ROW = 3  # looks at which a rank is the slow one before it is called a straggler
_LEAST_EXCESS = 0.01  # seconds a step a straggler costs at least; a toy's milliseconds are noise
_LEAST_WAIT = 0.05  # seconds a step of waiting for data; below that nobody would notice


@dataclass(frozen=True)
class RankHealth:
    """What one rank saw since its last look. None: not known here."""

    host: str
    forward: float | None  # own seconds per token
    tokens: int
    waited: float | None  # share of the time
    waited_seconds: float  # a step
    memory: float | None  # share of the GPU at its fullest
    throttle: list[str]
    adapters: int  # checksum


class HealthChecks:
    """Every `every` steps: stragglers, data starvation, memory, throttling, adapters that stand still."""

    def __init__(self, settings: GuardsSection, processes: Processes, gpu: Gpu | None, every: int) -> None:
        self.settings, self.processes, self.gpu, self.every = settings, processes, gpu, every
        self.forward = OwnForward(processes.device)
        self._slow: tuple[int, int] = (-1, 0)  # the slow rank of the last looks, and of how many
        self._adapters: int | None = None  # checksum of all ranks' at the last look; the same on any number of ranks
        self._moving = False  # a step since then should have changed them
        self._mark: tuple[float, float, int] | None = None  # clock without pauses, seconds waited, step
        self._trainer: ShardedSFTTrainer | None = None

    def attach(self, trainer: ShardedSFTTrainer) -> None:
        self._trainer = trainer
        self.forward.watch(trainer.model)

    def begin(self) -> None:
        """A loop begins: its clock is not that of another one."""
        self._mark = None

    def step_begins(self, step: int) -> None:
        if step % self.every == 0:
            self.forward.arm()

    def step_ended(self, step: int, moving: bool) -> list[Alarm]:
        """A collective on the steps of a look. `moving`: this step should have changed the adapters."""
        self._moving = self._moving or moving
        if self._mark is None:  # after the first step: starting the loaders is no starvation
            self._mark = self._clock(step)
        if step % self.every:
            return []
        looks = [RankHealth(**look) for look in self.processes.all_gather(asdict(self._look(step)))]
        found = (self._straggler(step, looks), self._starved(step, looks), self._full(step, looks),
                 self._throttled(step, looks), self._frozen(step, looks))  # fmt: skip
        self._adapters, self._moving = sum(look.adapters for look in looks), False
        self._mark = self._clock(step)
        return [alarm for alarm in found if alarm is not None and getattr(self.settings, alarm.guard) != "off"]

    def _clock(self, step: int) -> tuple[float, float, int]:
        assert self._trainer is not None
        return time.perf_counter() - self._trainer.paused_seconds, self._trainer.data_seconds, step

    def _look(self, step: int) -> RankHealth:
        assert self._trainer is not None and self._mark is not None
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
            adapters=_adapters_checksum(self._trainer.model) if self.settings.frozen_adapter != "off" else 0,
        )

    def _straggler(self, step: int, looks: list[RankHealth]) -> Alarm | None:
        paces = [look.forward for look in looks if look.forward is not None]
        if len(paces) < 2 or len(paces) < len(looks):
            return None
        slow = max(range(len(paces)), key=paces.__getitem__)
        others = statistics.median([pace for rank, pace in enumerate(paces) if rank != slow])
        limit = others * self.settings.straggler_ratio
        if paces[slow] <= limit or (paces[slow] - others) * looks[slow].tokens < _LEAST_EXCESS:
            self._slow = (-1, 0)
            return None
        self._slow = (slow, self._slow[1] + 1 if self._slow[0] == slow else 1)
        if self._slow[1] < _IN_A_ROW:
            return None
        return Alarm(
            "straggler", step, f"Rank {slow} on {looks[slow].host} is slow: its own forward pass takes "
            f"{paces[slow] / others:.1f} times as long per token as the other ranks'; all wait for it.",
            value=paces[slow] / others, limit=self.settings.straggler_ratio, ranks=(slow,),
            fix="Look at that machine: other jobs, clocks, temperature, a GPU that runs in a slower mode.",
        )  # fmt: skip

    def _starved(self, step: int, looks: list[RankHealth]) -> Alarm | None:
        limit = self.settings.data_starvation_share
        ranks = tuple(
            rank for rank, look in enumerate(looks)
            if look.waited is not None and look.waited > limit and look.waited_seconds > _LEAST_WAIT
        )  # fmt: skip
        if not ranks:
            return None
        most = max(looks[rank].waited or 0.0 for rank in ranks)
        return Alarm(
            "data_starvation", step, f"{_named(ranks, looks)} waited for data for {most:.0%} of the time.",
            value=most, limit=limit, ranks=ranks,
            fix="Set train.dataloader_num_workers (for example 2), or put the prepared data on a faster disk.",
        )  # fmt: skip

    def _full(self, step: int, looks: list[RankHealth]) -> Alarm | None:
        limit = self.settings.memory_share
        ranks = tuple(rank for rank, look in enumerate(looks) if look.memory is not None and look.memory > limit)
        if not ranks:
            return None
        most = max(looks[rank].memory or 0.0 for rank in ranks)
        return Alarm(
            "memory", step, f"The GPU of {_named(ranks, looks).lower()} was {most:.1%} full at its fullest: a longer "
            "row may not fit.", value=most, limit=limit, ranks=ranks,
            fix="Halve train.per_device_train_batch_size and double train.gradient_accumulation_steps.",
        )  # fmt: skip

    def _throttled(self, step: int, looks: list[RankHealth]) -> Alarm | None:
        ranks = tuple(rank for rank, look in enumerate(looks) if look.throttle)
        if not ranks:
            return None
        reasons = sorted({reason for rank in ranks for reason in looks[rank].throttle})
        text = f"The GPU of {_named(ranks, looks).lower()} slows itself down: {', '.join(reasons)}."
        fix = "Look at its cooling and power; the run goes on, slower."
        return Alarm("throttling", step, text, ranks=ranks, fix=fix)

    def _frozen(self, step: int, looks: list[RankHealth]) -> Alarm | None:
        same = self._adapters == sum(look.adapters for look in looks)
        if not same or not self._moving:
            return None
        return Alarm(
            "frozen_adapter", step, f"No adapter has changed by a bit in the last {self.every} steps, although the "
            "learning rate is not zero.",
            fix="Raise train.learning_rate; if the gradient norm is zero, no row teaches anything.",
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"slow": list(self._slow), "adapters": self._adapters, "moving": self._moving}

    def restore(self, saved: dict[str, Any]) -> None:
        self._slow = (saved["slow"][0], saved["slow"][1])
        self._adapters, self._moving = saved["adapters"], saved["moving"]


def _named(ranks: tuple[int, ...], looks: list[RankHealth]) -> str:
    hosts = ", ".join(sorted({looks[rank].host for rank in ranks}))
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({hosts})"


def _adapters_checksum(model: torch.nn.Module) -> int:
    return sum(checksum(parameter) for parameter in model.parameters() if parameter.requires_grad)
