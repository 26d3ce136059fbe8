"""How does a run roll back? In the same process, to the newest checkpoint before the alarm, without its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtune.checkpoint.store import CheckpointStore
from shardtune.train.guards.alarm import Alarm
from shardtune.train.resume import ResumePoint, resume_point

if TYPE_CHECKING:
    from shardtune.train.loop import TrainingLoop


def roll_back(alarm: Alarm, loop: TrainingLoop) -> ResumePoint:
    """Where the loop resumes from, as in a new process; its model has that checkpoint's adapter. A collective.

    Everything is restored from the checkpoint: adapter, optimizer, schedule, random state, sums, the guards' state.
    Steps between the checkpoint and the alarm are repeated with the same rows, bit-identical; the affected steps
    (`alarm.first_step` to `alarm.step`) are skipped: neither computed nor taken, while step numbers, and with them the
    learning rate, advance. Checkpoints of the affected steps are set aside, or a later resume would begin there.

    Raises:
        GuardStop: there is no earlier checkpoint.
    """
    loop.saver.finish()
    store, processes, guards = loop.saver.store, loop.processes, loop.guards
    if not processes.share_from_main(_set_aside(store, alarm.first_step) if processes.is_main else True):
        guards.stop(
            alarm,
            "Save checkpoints more often (train.save_steps), or remove these rows from the data and start again.",
            " Cannot roll back: there is no earlier checkpoint.",
        )
    point = resume_point(store, loop.model, processes, loop.saver.facts, loop.math)
    assert point is not None
    guards.passed_over.update(range(alarm.first_step, alarm.step + 1))
    guards.report_rollback(alarm, point.step)
    return point


def _set_aside(store: CheckpointStore, first_bad: int) -> bool:
    """Set aside checkpoints from step `first_bad` on; is an older one left?"""
    for step in [step for step in store.steps() if step >= first_bad]:
        store.set_aside(step, "passed-over")
    return bool(store.steps())
