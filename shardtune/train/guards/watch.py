"""What happens when a step goes wrong? Every guard judges it, with the same verdict on all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from shardtune.config.schema import GuardsSection
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import Processes
from shardtune.terminal import say
from shardtune.train.guards.alarm import Alarm, GuardStop, RollBack, format_rows
from shardtune.train.guards.curve import Curve
from shardtune.train.guards.health import HealthChecks
from shardtune.train.guards.numbers import Seen, drop_if_not_finite, exchange
from shardtune.train.guards.weights import non_finite_tensors

if TYPE_CHECKING:
    import torch

    from shardtune.train.guards.numbers import HostNumber
    from shardtune.train.loop import TrainingLoop

_REPEAT_STEPS = 10  # a guard that has warned does not warn again sooner


class Guards:
    """Judges every step before the optimizer takes it, and every few steps the machine.

    Losses are read when the backward pass is queued behind them. The gradient norm is not waited for: a step's norm
    is judged while the next one is computed, or before anything is logged, evaluated or saved. Until then the device
    itself keeps NaN and infinite gradients from the optimizer. Only `skip-step` by the norm has to wait for it.
    """

    def __init__(
        self,
        settings: GuardsSection,
        console: Console,
        events: EventLog,
        processes: Processes,
        health: HealthChecks,
    ) -> None:
        self.settings, self.console, self.events, self.processes = settings, console, events, processes
        self.curve, self.health = Curve(settings), health
        actions = (settings.non_finite, settings.loss_spike, settings.grad_norm_spike)
        self.waits = processes.device.type == "cpu" or "skip-step" in actions
        self.passed_over: set[int] = set()  # steps whose rows are not trained on again after a rollback
        self.left_out = False  # the step that is being computed
        self.skips = self.in_a_row = self.rollbacks = 0
        self._warned: dict[str, int] = {}
        self._loop: TrainingLoop | None = None
        self._pending: Seen | None = None

    def attach(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self.health.attach(loop)

    @property
    def loop(self) -> TrainingLoop:
        assert self._loop is not None
        return self._loop

    # What the loop calls, in this order.

    def begin(self) -> None:
        self._pending, self.left_out = None, False
        self.health.begin()

    def begin_step(self, step: int) -> None:
        self.left_out = step in self.passed_over
        self.health.begin_step(step)

    def judge(self, step: int, losses: list[HostNumber], norm: torch.Tensor | None) -> float:
        """Before the optimizer: `left_out` says whether it may take the step.

        Args:
            losses: Of this rank's micro-batches.
            norm: Of the gradient over all ranks, before clipping; None for a step that was not computed.

        Returns:
            The step's loss over all ranks.

        Raises:
            RollBack, GuardStop: on every rank.
        """
        self.settle()
        if norm is None:
            return math.nan
        # The device is still busy with the backward pass when its losses are asked for: nothing stands still.
        seen = exchange(step, [loss.value() for loss in losses], norm, self.processes)
        if any(micro >= 0 for micro in seen.bad) or self.waits:
            self._judge(seen)
        else:
            drop_if_not_finite(self.loop.trained, norm)
            self._pending = seen
        return seen.loss

    def settle(self) -> None:
        """Judge the step whose norm was not waited for."""
        if self._pending is not None:
            seen, self._pending = self._pending, None
            self._judge(seen)

    def end_step(self, step: int, *, moving: bool) -> None:
        """`moving`: the step should have changed the adapters."""
        for alarm in self.health.end_step(step, moving):
            self._act(alarm)

    def evaluated(self, step: int, loss: float) -> None:
        """A validation loss that is NaN or infinite ends the run, whatever the action for steps: no row is to blame."""
        if not math.isfinite(loss):
            text = f"The validation loss is {_called(loss)} at step {step}; stopping the run."
            alarm = Alarm("non_finite", step, text, value=loss)
            self._stop_if_weights_are_to_blame(alarm)
            self.stop(alarm, "Lower train.learning_rate; checkpoints with a finite validation loss are usable.")

    # What is done about it.

    def _judge(self, seen: Seen) -> None:
        norm = None if seen.norm is None else seen.norm.value()
        alarm = self._non_finite(seen, norm)
        if alarm is not None:
            self._stop_if_weights_are_to_blame(alarm)
        alarm = alarm or self.curve.spike(seen.step, seen.loss, norm)
        if alarm is not None and self._act(self._with_rows(alarm, seen)) == "skip-step":
            return
        self.in_a_row = 0
        self.curve.accept(seen.step, seen.loss, norm)
        trend = self.curve.trend(seen.step)
        if trend is not None:
            self._act(trend)

    def _non_finite(self, seen: Seen, norm: float | None) -> Alarm | None:
        ranks = tuple(rank for rank, micro in enumerate(seen.bad) if micro >= 0)
        fix = (
            "Lower train.learning_rate, raise the warm-up, or inspect these rows. Earlier checkpoints hold no NaN; if "
            "it recurs from one, start from an older one or anew. "
            "With guards.non_finite: skip-step or rollback, training continues without these rows."
        )
        if ranks:
            values = ", ".join(f"{_called(seen.losses[rank])} on rank {rank}" for rank in ranks)
            text = f"Loss is not finite at step {seen.step}: {values}."
            return Alarm("non_finite", seen.step, text, value=seen.losses[ranks[0]], ranks=ranks, fix=fix)
        if norm is not None and not math.isfinite(norm):
            text = f"The gradient norm is {_called(norm)} at step {seen.step}, while every rank's loss is finite."
            return Alarm("non_finite", seen.step, text, value=norm, fix=fix)
        return None

    def _stop_if_weights_are_to_blame(self, alarm: Alarm) -> None:
        """Weights that were NaN or Inf before the first step are not the fault of rows or learning rate. A collective.

        An adapter that became NaN later was damaged by a step, and is treated as any other non-finite loss.
        """
        by_rank = self.processes.all_gather(non_finite_tensors(self.loop.model))
        frozen, trained = (
            [(name, rank) for rank, names in enumerate(by_rank) for name, trains in names.items() if trains is which]
            for which in (False, True)
        )
        resumed = self.loop.resumed
        if not frozen and (not trained or alarm.step > (resumed.step if resumed is not None else 0) + 1):
            return
        name, rank = (frozen or trained)[0]
        count = len({name for name, _ in frozen or trained})
        fix = (
            "The checkpoint is damaged, or overflowed when it was converted: download or convert it again, and check "
            "this tensor. Neither another learning rate nor other data will help."
            if frozen
            else "The checkpoint the run resumes from contains it: delete that checkpoint to resume from the one "
            "before, or start over (--resume never)."
        )
        more = f" and {count - 1} other tensors contain" if count > 1 else " contains"
        kind = "the model's weights" if frozen else "the loaded adapter"
        text = f"{alarm.text} It comes from {kind}: '{name}'{more} NaN or Inf (on rank {rank})."
        self.stop(Alarm(alarm.guard, alarm.step, text, value=alarm.value), fix)

    def _with_rows(self, alarm: Alarm, seen: Seen) -> Alarm:
        """The rows of the step; of a non-finite loss, those of the first such micro-batch on each rank."""
        rows_of_step = self.loop.batches.rows_of_step
        if not alarm.ranks:
            rows = rows_of_step(alarm.step)
        else:
            rows = [row for rank in alarm.ranks for row in rows_of_step(alarm.step, rank, seen.bad[rank])]
        return Alarm(**{**vars(alarm), "rows": tuple(rows)})

    def _act(self, alarm: Alarm) -> str:
        """Do what the settings say, and return it; rollback and stop do not return."""
        action = str(getattr(self.settings, alarm.guard))
        if action == "warn":
            self._warn(alarm)
        elif action == "skip-step":
            self._skip(alarm)
        elif action == "rollback":
            self._roll_back(alarm)
        else:
            self.stop(alarm, alarm.fix)
        return action

    def _warn(self, alarm: Alarm) -> None:
        if alarm.step - self._warned.get(alarm.guard, -_REPEAT_STEPS) >= _REPEAT_STEPS:
            self._warned[alarm.guard] = alarm.step
            self._report(alarm, "warn", f"{alarm.sentence()} {alarm.fix}")

    def _skip(self, alarm: Alarm) -> None:
        self.skips, self.in_a_row = self.skips + 1, self.in_a_row + 1
        if self.in_a_row > self.settings.max_skips:
            fix = "Check the rows and the learning rate. Earlier checkpoints hold no NaN."
            self.stop(alarm, fix, f" {self.in_a_row} steps in a row would be skipped (guards.max_skips).")
        self._report(alarm, "skip-step", f"{alarm.sentence()} Step skipped ({self.skips} so far).")
        self.left_out = True

    def _roll_back(self, alarm: Alarm) -> None:
        self.rollbacks += 1
        if self.rollbacks > self.settings.max_rollbacks:
            self.stop(
                alarm, alarm.fix, f" The run rolled back {self.rollbacks - 1} times before (guards.max_rollbacks)."
            )
        raise RollBack(alarm)

    def report_rollback(self, alarm: Alarm, to_step: int) -> None:
        steps = f"step {alarm.step}" if alarm.first_step == alarm.step else f"steps {alarm.first_step}–{alarm.step}"
        message = f"{alarm.sentence()} Rolling back to step {to_step}, then skipping the rows of {steps}."
        count = f"(Rollback {self.rollbacks} of at most {self.settings.max_rollbacks}.)"
        self._report(alarm, "rollback", f"{message} {count}", to_step)

    def stop(self, alarm: Alarm, fix: str, more: str = "") -> NoReturn:
        """Ends the run on this rank; every rank calls this with the same alarm."""
        self._report(alarm, "stop", "")
        code = "loss-nan" if alarm.guard == "non_finite" else "guard-stop"
        raise GuardStop(alarm.text + more, why=_why(alarm), fix=fix, code=code)

    def _report(self, alarm: Alarm, action: str, message: str, to_step: int | None = None) -> None:
        if self.processes.is_main:
            self.events.write("guard", **alarm.event(action, to_step))
        if message:
            say(self.console, "guard", f"{alarm.guard}: {message.strip()}", "bold yellow")

    # What a checkpoint stores.

    def state(self) -> dict[str, Any]:
        return {
            "curve": self.curve.state(), "health": self.health.state(), "passed_over": sorted(self.passed_over),
            "skips": self.skips, "in_a_row": self.in_a_row, "rollbacks": self.rollbacks, "warned": dict(self._warned),
        }  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        """As it was at the checkpoint, except that steps a later rollback skips stay skipped."""
        self.curve.restore(saved["curve"])
        self.health.restore(saved["health"])
        self.passed_over |= set(saved["passed_over"])
        self.skips, self.in_a_row, self._warned = saved["skips"], saved["in_a_row"], dict(saved["warned"])
        self.rollbacks = max(self.rollbacks, saved["rollbacks"])


def _called(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"


def _why(alarm: Alarm) -> str:
    ranks = f"Rank{'s' if len(alarm.ranks) > 1 else ''} {', '.join(map(str, alarm.ranks))}. " if alarm.ranks else ""
    return f"{ranks}{format_rows(alarm.rows)}".strip()
