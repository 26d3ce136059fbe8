"""How does a run go back? In the same process, to the newest checkpoint from before the trouble, without its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtune.checkpoint.store import CheckpointStore
from shardtune.train.guards.alarm import Alarm
from shardtune.train.guards.watch import Guards
from shardtune.train.resume import ResumePoint, resume_point

if TYPE_CHECKING:
    from shardtune.parallel.processes import Processes
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.saving import RunFacts
    from shardtune.train.trainer import ShardedSFTTrainer


def go_back(
    alarm: Alarm,
    guards: Guards,
    trainer: ShardedSFTTrainer,
    processes: Processes,
    facts: RunFacts,
    math: TrainingMath,
) -> ResumePoint:
    """Make the trainer ready to be called again, as in a new process that resumes. A collective.

    Everything comes back from the checkpoint: adapter, optimizer, schedule, random state, sums, what the guards
    remember. Steps between the checkpoint and the trouble are done again with the same rows to the same bits; the steps
    of the trouble (`alarm.first_step` to `alarm.step`) are passed over: neither computed nor taken, while their
    numbers, and with them the learning rate, go on. Checkpoints from inside the trouble are set aside, or a later
    resume would begin there.

    Raises:
        GuardStop: there is no checkpoint from before.
    """
    trainer.saver.finish()
    store = trainer.saver.store
    if not processes.share_from_main(_set_aside(store, alarm.first_step) if processes.is_main else True):
        guards.stop(
            alarm,
            "Write checkpoints more often (train.save_steps), or use guards."
            f"{alarm.guard}: stop. Rows can be left out of the data.",
            " It cannot go back: there is no checkpoint from before.",
        )
    point = resume_point(store, trainer.model, processes, facts, math)
    assert point is not None
    guards.passed_over.update(range(alarm.first_step, alarm.step + 1))
    guards.tell_rollback(alarm, point.step)
    trainer.resume_from(point)
    return point


def _set_aside(store: CheckpointStore, first_bad: int) -> bool:
    """Take checkpoints from `first_bad` on out of the line; is an older one left?"""
    for step in [step for step in store.steps() if step >= first_bad]:
        store.set_aside(step, "passed-over")
    return bool(store.steps())
