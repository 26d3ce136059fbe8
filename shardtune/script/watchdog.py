"""Does a script get on? Its steps have a deadline; outside of them, a rank that is idle or waits for others has one."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.run.watchdog import Watchdog, waits_for_others

STARTING = "running the script, before its first step"
_WINDOW = 10.0  # seconds over which CPU time is counted
_BUSY = 0.05  # of one core: less is a process that only waits
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ScriptLimits:
    """Seconds without progress that are too many: until the first step, and from one step to the next.

    Where the script says that it is in a step, or the user has set the limit, nothing but steps counts. Otherwise
    nobody knows what the script does (it may prepare data for hours): then only the time counts in which the rank was
    idle or waited for other ranks.
    """

    load: float
    step: float
    load_is_given: bool = False
    step_is_given: bool = False

    @property
    def longest(self) -> float:
        return max(self.load, self.step)

    def of_phase(self, phase: str) -> float:
        return self.load if phase == STARTING else self.step


class ScriptWatchdog(Watchdog):
    """`enter` and `beat` come from `observe`; the steps of torch's optimizers are seen without it."""

    def __init__(self, rank: int, limits: ScriptLimits) -> None:
        super().__init__(rank, limits)
        self.script_limits = limits
        self.in_step = False
        self.handles_stop = False
        self._phase = STARTING
        self._optimizer_steps = 0
        self._hooked = False
        self._cpu = (time.monotonic(), _cpu_seconds())

    @property
    def steps_seen(self) -> int:
        return max(self._step, self._optimizer_steps)

    @property
    def limit(self) -> float:
        return self.script_limits.step if self.in_step or self.steps_seen else self.script_limits.load

    @property
    def limit_named(self) -> str:  # type: ignore[override]
        """And that the script has not stepped yet."""
        if self.in_step or self.steps_seen:
            return " (parallel.step_timeout_minutes)"
        return " and no step yet (parallel.load_timeout_minutes)"

    @property
    def begun(self) -> bool:
        """Whether a stop request is answered with a checkpoint."""
        return self.handles_stop

    @property
    def doing(self) -> str:
        step = self._step or self._optimizer_steps
        return self._phase + (f" (step {step})" if step else "")

    @property
    def _counts_steps_only(self) -> bool:
        limits = self.script_limits
        return self.in_step or (limits.step_is_given if self.steps_seen else limits.load_is_given)

    def look(self) -> None:
        self._follow_optimizers()
        (since, before), now = self._cpu, time.monotonic()
        if now - since < _WINDOW:
            return
        used = _cpu_seconds()
        self._cpu = (now, used)
        is_busy = used - before > _BUSY * (now - since) and not waits_for_others(self.main_stack())
        if is_busy and not self._counts_steps_only:
            self.beat()

    def _follow_optimizers(self) -> None:
        """Once the script has imported torch: every optimizer step is progress."""
        module: Any = sys.modules.get("torch.optim.optimizer")
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if self._hooked or register is None:
            return

        def stepped(optimizer: object, args: object, kwargs: object) -> None:
            self._optimizer_steps += 1
            self.beat()

        register(stepped)
        self._hooked = True


def _cpu_seconds() -> float:
    """Of this process and its data loaders (its process group), also those that have ended, where /proc shows them."""
    own, ticks, seen = os.getpgrp(), 0, False
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
        except (OSError, IndexError):  # it has just ended
            continue
        if int(fields[2]) == own:
            seen = True
            ticks += sum(map(int, fields[11:15]))  # its own, and of children that it has waited for
    return ticks / _TICKS if seen else time.process_time()
