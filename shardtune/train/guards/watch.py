"""Who looks at each step, and what happens then? One callback that asks every guard, on all ranks with one answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from transformers import TrainerCallback

from shardtune.config.schema import GuardsSection
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import Processes
from shardtune.terminal import say
from shardtune.train.guards.alarm import Alarm, GuardStop, RollBack, rows_told
from shardtune.train.guards.curve import Curve
from shardtune.train.guards.health import HealthChecks
from shardtune.train.guards.numbers import Seen, Undo, drop_if_not_finite, exchange
from shardtune.train.guards.weights import not_finite

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from shardtune.train.trainer import ShardedSFTTrainer

_QUIET = 10  # steps for which a guard that has warned does not warn again


class Guards(TrainerCallback):
    """Looks at every step before the optimizer takes it, and now and then at the machine. Comes first of the callbacks.

    Losses are read when the backward pass is queued behind them. The gradient's norm is not waited for: a step's norm
    is looked at while the next one is computed, or before anything is logged, evaluated or saved. Until then the device
    itself keeps gradients that are no numbers from the optimizer. Only `skip-step` by the norm has to wait for it.
    """

    def __init__(
        self,
        settings: GuardsSection,
        console: Console,
        events: EventLog,
        processes: Processes,
        looks: HealthChecks,
    ) -> None:
        self.settings, self.console, self.events, self.processes = settings, console, events, processes
        self.curve, self.looks = Curve(settings), looks
        actions = (settings.non_finite, settings.loss_spike, settings.grad_norm_spike)
        self.waits = processes.device.type == "cpu" or "skip-step" in actions
        self.passed_over: set[int] = set()  # steps whose rows no rollback may meet again
        self.left_out = False  # the step that is being computed
        self.skips = self.in_a_row = self.rollbacks = 0
        self._warned: dict[str, int] = {}
        self._trainer: ShardedSFTTrainer | None = None
        self._pending: Seen | None = None
        self._undo: Undo | None = None

    def attach(self, trainer: ShardedSFTTrainer) -> None:
        self._trainer = trainer
        trainer.guards = self
        self.looks.attach(trainer)

    @property
    def trainer(self) -> ShardedSFTTrainer:
        assert self._trainer is not None
        return self._trainer

    # What the loop calls, in this order.

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._pending, self.left_out = None, False
        self.looks.begin()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = state.global_step + 1
        self.left_out = step in self.passed_over
        self._undo = Undo(self.trainer)
        self.trainer.micro_losses.clear()
        self.looks.step_begins(step)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.settle()
        if self.left_out:
            self._leave_out()
            return
        norm = self.trainer.grad_norm
        # The device is still busy with the backward pass when its losses are asked for: nothing stands still.
        losses = [loss.value() for loss in self.trainer.micro_losses]
        seen = exchange(state.global_step + 1, losses, norm, self.processes)
        if any(micro >= 0 for micro in seen.bad) or self.waits:
            self._judge(seen)
            return
        if norm is not None:
            drop_if_not_finite(self.trainer.trained, norm)
        self._pending = seen

    def settle(self) -> None:
        """Judge the step whose norm was not waited for."""
        if self._pending is not None:
            seen, self._pending = self._pending, None
            self._judge(seen)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        moving = not self.left_out and any(group["lr"] for group in optimizer.param_groups)
        for alarm in self.looks.step_ended(state.global_step, moving):
            self._act(alarm)

    def evaluated(self, step: int, loss: float) -> None:
        """A validation loss that is no number ends the run, whatever is done about steps: no row is to blame."""
        if not math.isfinite(loss):
            text = f"The validation loss is {_called(loss)} at step {step}; the run is stopped."
            alarm = Alarm("non_finite", step, text, value=loss)
            self._stop_if_weights_are_to_blame(alarm)
            self.stop(alarm, "Lower train.learning_rate; checkpoints of steps with a finite validation loss are good.")

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
            "Lower train.learning_rate, raise the warm-up, or look at these rows. Checkpoints written before are good. "
            "guards.non_finite: skip-step or rollback goes on without them."
        )
        if ranks:
            values = ", ".join(f"{_called(seen.losses[rank])} on rank {rank}" for rank in ranks)
            text = f"Loss is not finite at step {seen.step}: {values}."
            return Alarm("non_finite", seen.step, text, value=seen.losses[ranks[0]], ranks=ranks, fix=fix)
        if norm is not None and not math.isfinite(norm):
            text = f"The gradient norm is {_called(norm)} at step {seen.step}, and every rank's loss is finite."
            return Alarm("non_finite", seen.step, text, value=norm, fix=fix)
        return None

    def _stop_if_weights_are_to_blame(self, alarm: Alarm) -> None:
        """Where weights were NaN or Inf before the first step, neither rows nor the learning rate are. A collective.

        An adapter that has become so later was spoilt by a step, as any other loss that is no number.
        """
        found = self.processes.all_gather(not_finite(self.trainer.model))
        frozen, trained = (
            [(name, rank) for rank, names in enumerate(found) for name, trains in names.items() if trains is which]
            for which in (False, True)
        )
        resumed = self.trainer.resumed
        if not frozen and (not trained or alarm.step > (resumed.step if resumed is not None else 0) + 1):
            return
        name, rank = (frozen or trained)[0]
        count = len({name for name, _ in frozen or trained})
        fix = (
            "The checkpoint is damaged, or overflowed when it was converted: download or convert it again, and look at "
            "this tensor. No learning rate and no other rows help."
            if frozen
            else "The checkpoint the run goes on from holds it: set it aside and go on from the one before, or begin "
            "anew (--resume never)."
        )
        more = f" and {count - 1} other tensors hold" if count > 1 else " holds"
        kind = "the model's weights" if frozen else "the adapter that was loaded"
        text = f"{alarm.text} It comes from {kind}: '{name}'{more} NaN or Inf (seen on rank {rank})."
        self.stop(Alarm(alarm.guard, alarm.step, text, value=alarm.value), fix)

    def _with_rows(self, alarm: Alarm, seen: Seen) -> Alarm:
        """The rows of the step; of a loss that is no number, those of the first such micro-batch on each rank."""
        if not alarm.ranks:
            rows = self.trainer.rows_of_step(alarm.step)
        else:
            rows = [row for rank in alarm.ranks for row in self.trainer.rows_of_step(alarm.step, rank, seen.bad[rank])]
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
        if alarm.step - self._warned.get(alarm.guard, -_QUIET) >= _QUIET:
            self._warned[alarm.guard] = alarm.step
            self._tell(alarm, "warn", f"{alarm.sentence()} {alarm.fix}")

    def _skip(self, alarm: Alarm) -> None:
        self.skips, self.in_a_row = self.skips + 1, self.in_a_row + 1
        if self.in_a_row > self.settings.max_skips:
            fix = "The steps before the first of them are in the checkpoints. Look at the rows and the learning rate."
            self.stop(alarm, fix, f" {self.in_a_row} steps in a row would be skipped (guards.max_skips).")
        self._tell(alarm, "skip-step", f"{alarm.sentence()} The step is skipped ({self.skips} so far).")
        self._leave_out()

    def _leave_out(self) -> None:
        assert self._undo is not None
        self.left_out = True
        self._undo()

    def _roll_back(self, alarm: Alarm) -> None:
        self.rollbacks += 1
        if self.rollbacks > self.settings.max_rollbacks:
            self.stop(alarm, alarm.fix, f" There were {self.rollbacks - 1} rollbacks before (guards.max_rollbacks).")
        raise RollBack(alarm)

    def tell_rollback(self, alarm: Alarm, to_step: int) -> None:
        steps = f"step {alarm.step}" if alarm.first_step == alarm.step else f"steps {alarm.first_step}–{alarm.step}"
        what = f"{alarm.sentence()} The run goes back to step {to_step} and passes over the rows of {steps}."
        self._tell(alarm, "rollback", f"{what} ({self.rollbacks} of at most {self.settings.max_rollbacks}.)", to_step)

    def stop(self, alarm: Alarm, fix: str, more: str = "") -> NoReturn:
        """Ends the run on this rank; every rank comes here with the same alarm."""
        self._tell(alarm, "stop", "")
        raise GuardStop(alarm.text + more, why=_why(alarm), fix=fix)

    def _tell(self, alarm: Alarm, action: str, said: str, to_step: int | None = None) -> None:
        if self.processes.is_main:
            self.events.write("guard", **alarm.event(action, to_step))
        if said:
            say(self.console, "guard", f"{alarm.guard}: {said.strip()}", "bold yellow")

    # What a checkpoint keeps of it.

    def state(self) -> dict[str, Any]:
        return {
            "curve": self.curve.state(), "looks": self.looks.state(), "passed_over": sorted(self.passed_over),
            "skips": self.skips, "in_a_row": self.in_a_row, "rollbacks": self.rollbacks, "warned": dict(self._warned),
        }  # fmt: skip

    def restore(self, saved: dict[str, Any]) -> None:
        """As it was at the checkpoint, but what was learnt about bad rows since then (by a rollback) stays known."""
        self.curve.restore(saved["curve"])
        self.looks.restore(saved["looks"])
        self.passed_over |= set(saved["passed_over"])
        self.skips, self.in_a_row, self._warned = saved["skips"], saved["in_a_row"], dict(saved["warned"])
        self.rollbacks = max(self.rollbacks, saved["rollbacks"])


def _called(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"


def _why(alarm: Alarm) -> str:
    ranks = f"Rank{'s' if len(alarm.ranks) > 1 else ''} {', '.join(map(str, alarm.ranks))}. " if alarm.ranks else ""
    return f"{ranks}{rows_told(alarm.rows)}".strip()
