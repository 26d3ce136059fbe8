"""When is a checkpoint written, and what if it cannot be? Gathered by all ranks, written by rank 0 beside training."""

from __future__ import annotations

import errno
import importlib.metadata
import time
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtune import __version__
from shardtune.checkpoint.adapter import gather_adapter, inference_config
from shardtune.checkpoint.background import BackgroundWriter, Outcome
from shardtune.checkpoint.manifest import ManifestError
from shardtune.checkpoint.optimizer import gather_optimizer
from shardtune.checkpoint.rng import pack_rng
from shardtune.checkpoint.snapshot import Snapshot
from shardtune.checkpoint.store import CheckpointStore
from shardtune.machine import free_memory
from shardtune.terminal import say, size, warn
from shardtune.train.callbacks import callback_states

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftConfig

    from shardtune.train.context import RunContext
    from shardtune.train.loop import TrainingLoop

_MEMORY_SHARE = 4  # a state larger than a quarter of the free memory is written before training goes on


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says about the run it is of; compared when a run resumes from it.

    Attributes:
        settings: The settled config by section, without secrets.
        identity: Hash of what makes it this run (`checkpoint/changes.py`).
        asked: The config as it was given, as `run.json` has it; a run whose `run.json` is lost is found by it.
        data: Fingerprint of the prepared data.
        batch: per_device, accumulation, processes, effective.
        steps_per_epoch: Follows from data and effective batch.
    """

    settings: dict[str, Any]
    identity: str
    asked: dict[str, Any]
    data: str
    batch: dict[str, int]
    steps_per_epoch: int


class CheckpointSaver:
    """Saves the whole state of a run. Every rank has one; rank 0 writes.

    `save` returns when the state is copied to rank 0's memory; the disk is written by a thread. One save is in flight:
    the next one, and the end of the run, wait for it. A save that fails because of the disk is reported and training
    continues with the older checkpoints in place; each further failure is reported again.
    """

    def __init__(self, store: CheckpointStore, context: RunContext, facts: RunFacts, minutes: float | None) -> None:
        self.store, self.facts, self.minutes = store, facts, minutes
        self.processes, self.console, self.events = context.processes, context.console, context.events
        self.failures = 0  # in a row
        self.longest = 0.0  # seconds the longest save took, in the loop and beside it
        self._last_good = max(store.steps(), default=None) if self.processes.is_main else None
        self._saved_at = time.monotonic()
        self._writer = BackgroundWriter()
        self._pending: dict[str, Any] = {}  # what the event of the save in flight will say

    def save(self, loop: TrainingLoop) -> None:
        """A collective: every rank calls it at the same step."""
        began = time.perf_counter()
        self.finish()
        main, step = self.processes.is_main, loop.state.global_step
        adapter = gather_adapter(loop.model, keep=main)
        state = gather_optimizer(loop.model, loop.optimizer, keep=main)
        rng = self.processes.gather(b64encode(pack_rng(self.processes.device)).decode("ascii"))
        metrics = self.processes.gather(loop.metrics.state())
        self._saved_at = time.monotonic()
        if not main:
            return
        snapshot = Snapshot(
            adapter=adapter,
            optimizer=state,
            trainer={**self._loop_state(loop), "metrics": metrics},
            rng=[b64decode(one) for one in rng],
        )
        self._write(step, snapshot, inference_config(loop.model), loop.eval_loss_at(step), began)

    def is_overdue(self) -> bool:
        """Have `train.save_minutes` passed since the last save? By rank 0's clock alone."""
        minutes = self.minutes if self.processes.is_main else None
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def record_eval(self, step: int, loss: float) -> None:
        """A checkpoint was evaluated after it was written. Only which one is the best hangs on it: not worth a run."""
        if not self.processes.is_main:
            return
        try:
            self.store.record_eval(step, loss)
        except (OSError, ManifestError) as error:
            text = f"Could not record the eval loss of the checkpoint of step {step}: {error}."
            warn(self.console, self.events, "checkpoint", text)

    def has(self, step: int) -> bool:
        """Whether the checkpoint of `step` is there, and can be seen."""
        try:
            return step in self.store.steps()
        except OSError:
            return False

    def poll(self) -> None:
        """Tell what became of a save that has ended; called at step boundaries."""
        outcome = self._writer.take()
        if outcome is not None:
            self._tell(outcome)

    def finish(self) -> None:
        """Wait for the save in flight and tell what became of it."""
        self._writer.wait()
        self.poll()

    def _loop_state(self, loop: TrainingLoop) -> dict[str, Any]:
        """What the loop remembers between two steps, for `trainer.json`: a copy, as it is written while training goes
        on. Floats survive JSON."""
        per_epoch, step = self.facts.steps_per_epoch, loop.state.global_step
        return {
            "step": step,
            "epoch": loop.state.epoch,
            "best": [loop.state.best_metric, loop.state.best_global_step],
            "log_history": [dict(entry) for entry in loop.state.log_history],
            "position": {"epoch": step // per_epoch, "step_in_epoch": step % per_epoch, "steps_per_epoch": per_epoch},
            "learning_rate": loop.scheduler.get_last_lr()[0],
            "guards": loop.guards.state(),
            "early_stopping": loop.early_stopping.state() if loop.early_stopping is not None else {},
            "callbacks": callback_states(loop.callbacks.callbacks),
            "batch": self.facts.batch,
            "data": self.facts.data,
            "settings": self.facts.settings,
            "identity": self.facts.identity,
            "asked": self.facts.asked,
        }

    def _write(self, step: int, snapshot: Snapshot, config: PeftConfig, eval_loss: float | None, began: float) -> None:
        about = {
            "time": time.time(),
            "epoch": snapshot.trainer["epoch"],
            "eval_loss": eval_loss,
            "world_size": self.processes.world_size,
            "identity": self.facts.identity,
            "versions": _versions(),
        }

        def job() -> Path:
            return self.store.write(step, lambda folder: snapshot.write(folder, config), about)

        free = free_memory()
        beside = free is None or snapshot.size * _MEMORY_SHARE < free
        if beside:
            self._pending = {"bytes": snapshot.size, "seconds": round(time.perf_counter() - began, 3)}
            self._writer.start(step, job)
        else:
            self._writer.run(step, job)
            self._pending = {"bytes": snapshot.size, "seconds": round(time.perf_counter() - began, 3)}
            self.poll()

    def _tell(self, outcome: Outcome) -> None:
        if outcome.error is None:
            self.failures, self._last_good = 0, outcome.step
            self.longest = max(self.longest, self._pending["seconds"] + outcome.background_seconds)
            self.events.write(
                "checkpoint",
                step=outcome.step,
                path=str(outcome.path),
                background_seconds=round(outcome.background_seconds, 3),
                **self._pending,
            )
            return
        self.failures += 1
        reason = outcome.error.strerror or str(outcome.error)
        self.events.write("checkpoint_failed", step=outcome.step, error=reason, in_a_row=self.failures, **self._pending)
        left = f"the last good one is step {self._last_good}" if self._last_good else "there is no older one"
        full = outcome.error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "Free space there, or lower train.save_total_limit." if full else "Check that folder and its disk."
        again = f" That is {self.failures} in a row." if self.failures > 1 else ""
        text = (
            f"Could not write the checkpoint of step {outcome.step} ({size(self._pending['bytes'])}) to "
            f"{self.store.folder}: {reason}.{again} Training continues; {left}. {advice}"
        )
        say(self.console, "warning", text, "bold red")


def _versions() -> dict[str, str]:
    libraries = ("torch", "transformers", "peft", "accelerate", "safetensors")
    return {"shardtune": __version__, **{name: importlib.metadata.version(name) for name in libraries}}
