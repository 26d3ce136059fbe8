"""How does a run's folder say which checkpoint is the best? Its pointer, and `final/` where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardtune.checkpoint.final import FINAL, FinalSource, can_be_replaced, damaged_final, replace_final, source_of
from shardtune.checkpoint.store import BEST, BETTER_IS_DAMAGED, CheckpointStore, Choice
from shardtune.durable import read_plain
from shardtune.errors import UserInputError
from shardtune.lease import is_held, owner
from shardtune.run.folder import CHECKPOINTS, LEASE, hold_run_folder, not_writable
from shardtune.run.which_run import is_finished, write_final_again


@dataclass(frozen=True)
class BestStep:
    """The step that is to be the best.

    Attributes:
        metric: What it is the best by, as `eval` events name it, with its value.
        is_tie: It is not the best value, but cannot be told apart from it.
    """

    step: int
    metric: str
    value: float
    eval_loss: float | None
    is_tie: bool = False


@dataclass(frozen=True)
class Recorded:
    """What was done, in words.

    Attributes:
        kept: Where the earlier `final/` is, if its weights would have been lost.
    """

    pointer: str
    final: str = ""
    kept: Path | None = None


def record_best(run: Path, best: BestStep | None, *, to_final: bool, in_final: int | None = None) -> Recorded:
    """Point to the best checkpoint, and make `final/` it.

    A run that another process is training in is not written to: with `to_final` that is an error.

    Args:
        best: Of the intact checkpoints; None: there is none.
        in_final: A better step, whose weights are in `final/` alone: a pointer names checkpoints.

    Raises:
        UserInputError: `final/` was to be replaced and cannot be.
    """
    if in_final is not None:
        alone = f"the weights of step {in_final:,} are in {FINAL}/ alone"
        if best is None:
            return Recorded(f"not written: {alone}")
        done = record_best(run, best, to_final=False)
        return replace(done, pointer=f"{done.pointer}: {alone}")
    assert best is not None
    store = CheckpointStore(run / CHECKPOINTS, keep=None)
    if not to_final and _is_recorded(store, best):
        return Recorded(f"{store.folder / BEST} names step {best.step:,}")
    if is_held(run / LEASE):
        why = f"{owner(run / LEASE).capitalize()} is training in it."
        if to_final:
            raise UserInputError(
                f"The run '{run.name}' is in progress: {FINAL}/ cannot be replaced.",
                why=f"{why} It writes {FINAL}/ itself when it ends.",
                fix="Wait for its end, or stop it.",
            )
        return Recorded(f"not written, the run is in progress: {why}")
    is_it = to_final and (now := source_of(run, store)) is not None and now.step == best.step
    is_intact = is_it and damaged_final(run, store) is None
    unchanged = f"unchanged: {FINAL}/ is step {best.step:,} already" if is_intact else ""
    if to_final and not unchanged and not can_be_replaced(run):
        raise _no_final(run, store.path(best.step))
    died = _content(run / LEASE)
    try:
        lease = hold_run_folder(run).lease
    except UserInputError as error:
        if to_final and not unchanged:
            raise
        return Recorded(f"not written: {error.what} {error.why}", unchanged)
    try:
        pointer = _point(store, best)
        if unchanged or not to_final:
            return Recorded(pointer, unchanged)
        source = FinalSource(best.step, best.eval_loss, best.metric, best.value)
        kept = replace_final(run, store, source)
        return Recorded(pointer, f"{run / FINAL} is step {best.step:,} now", kept)
    except OSError as error:
        raise not_writable(run, error) from error
    finally:
        lease.release(died)  # without it a run that died would be shown as running


def _no_final(run: Path, checkpoint: Path) -> UserInputError:
    finished = is_finished(run)
    again = f"{write_final_again(run)} Or" if finished else "Resume the run to its end, or"
    return UserInputError(
        f"The run '{run.name}' has no {FINAL}/{' any more' if finished else ''}.",
        why="Its tokenizer and settings are written when training ends; a checkpoint has the adapter alone.",
        fix=f"{again} use the checkpoint as it is, a PEFT adapter: {checkpoint}",
    )


def _content(file: Path) -> bytes:
    try:
        return read_plain(file)
    except OSError:
        return b""


def _point(store: CheckpointStore, best: BestStep) -> str:
    before = store.pointed_to()
    if best.step not in dict(store.by_eval_loss()) and best.eval_loss is not None:
        store.record_eval(best.step, best.eval_loss)  # the disk was full when it was evaluated
    store.choose(_choice(store, best))
    moved = f" (was step {before:,})" if before not in (None, best.step) else ""
    return f"{store.folder / BEST} names step {best.step:,}{moved}"


def _is_recorded(store: CheckpointStore, best: BestStep) -> bool:
    return store.pointed_to() == best.step and store.choice() == _choice(store, best)


def _choice(store: CheckpointStore, best: BestStep) -> Choice | None:
    """None where the lowest eval loss says the same."""
    if next(iter(store.by_eval_loss()), (None,))[0] == best.step:
        return None
    why = "it ties with the best" if best.is_tie else BETTER_IS_DAMAGED if best.metric == "loss" else best.metric
    return Choice(best.step, best.metric, best.value, why)
