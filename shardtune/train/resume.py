"""Where does the run resume? At the newest intact checkpoint of its folder, read by rank 0 and sent to every rank."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardtune.checkpoint.adapter import load_adapter
from shardtune.checkpoint.changes import Change, changes
from shardtune.checkpoint.rng import load_rng
from shardtune.checkpoint.snapshot import Snapshot, read_snapshot
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.parallel.exchange import tensor_from_spec, tensor_spec
from shardtune.train.callbacks import restore_callbacks

if TYPE_CHECKING:
    from peft import PeftModel

    from shardtune.parallel.processes import Processes
    from shardtune.plan.steps import TrainingMath
    from shardtune.train.loop import TrainingLoop
    from shardtune.train.saving import RunFacts


@dataclass(frozen=True)
class ResumePoint:
    """What a rank needs to resume.

    Attributes:
        trainer: `trainer.json`.
        optimizer: Whole tensors on rank 0, their shapes elsewhere (`meta`), until the optimizer exists.
        rng: This rank's random state; None on another number of processes.
        notices: What the user should know, a line each.
        damaged: Checkpoints that were skipped, and why.
    """

    step: int
    path: Path
    trainer: dict[str, Any]
    optimizer: dict[str, torch.Tensor]
    rng: bytes | None
    notices: tuple[str, ...]
    damaged: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Trained on before, by all ranks."""
        return sum(int(part["real_tokens"]) for part in self.trainer["metrics"])


def restore_loop(loop: TrainingLoop, point: ResumePoint) -> None:
    """Everything the loop remembers between two steps, but the optimizer and the random state."""
    saved, state = point.trainer, loop.state
    state.global_step, state.epoch = saved["step"], saved["epoch"]
    state.best_metric, state.best_global_step = saved["best"]
    state.log_history = list(saved["log_history"])
    loop.metrics.restore(saved["metrics"])
    loop.guards.restore(saved["guards"])
    if loop.early_stopping is not None and saved["early_stopping"]:
        loop.early_stopping.restore(saved["early_stopping"])
    restore_callbacks(loop.callbacks.callbacks, saved["callbacks"])


def missed_evaluation(loop: TrainingLoop) -> bool:
    """A stop cuts the evaluation short that belongs to the step of the checkpoint."""
    step, train = loop.state.global_step, loop.config.train
    at_step = train.eval_strategy == "steps" and step % train.eval_steps == 0 and train.eval_delay <= step
    at_epoch = train.eval_strategy == "epoch" and step % loop.math.steps_per_epoch == 0
    due = at_step or (at_epoch and train.eval_delay <= loop.state.epoch)
    return due and loop.eval_loss_at(step) is None


def seed_rank(loop: TrainingLoop, point: ResumePoint | None) -> None:
    """Dropout: each rank draws its own numbers, and after a resume those that come next."""
    seed = loop.config.train.seed + loop.processes.rank
    if point is None:
        torch.manual_seed(seed)
    elif point.rng is not None:
        load_rng(point.rng, loop.processes.device)
    else:  # another number of ranks than before: numbers that were not drawn yet
        torch.manual_seed(seed + 1_000_003 * point.step)


def resume_point(
    store: CheckpointStore, model: PeftModel, processes: Processes, facts: RunFacts, math: TrainingMath
) -> ResumePoint | None:
    """Load the newest intact checkpoint's adapter into the model and return the rest; None where there is none.

    DamagedCheckpoint ones are set aside. A collective; rank 0 alone reads, so that nodes need not share a disk.

    Raises:
        ShardtuneError: every checkpoint is damaged.
        UserInputError: the config changed in a way that makes it another run, or the effective batch changed.
    """
    snapshot: Snapshot | None = None
    found: dict[str, Any] | None = None  # what every rank is sent, as JSON
    failed: ShardtuneError | None = None
    if processes.is_main:
        try:
            snapshot, found = _find(store, facts, math, processes.world_size)
        except ShardtuneError as error:  # every rank has to stop, with the same message
            failed = error
            found = {"error": [error.what, error.why, error.fix], "mistake": isinstance(error, UserInputError)}
    found = processes.share_from_main(found)
    if found is None:
        return None
    if "error" in found:
        what, why, fix = found["error"]
        raise failed or (UserInputError if found["mistake"] else ShardtuneError)(what, why=why, fix=fix)
    if snapshot is not None:
        adapter, optimizer = snapshot.adapter, snapshot.optimizer
    else:
        adapter, optimizer = (
            {n: tensor_from_spec(t) for n, t in found[key].items()} for key in ("adapter", "optimizer")
        )
    load_adapter(model, adapter)
    same_world = len(found["rng"]) == processes.world_size
    return ResumePoint(
        step=found["step"],
        path=Path(found["path"]),
        trainer=found["trainer"],
        optimizer=optimizer,
        rng=b64decode(found["rng"][processes.rank]) if same_world else None,
        notices=tuple(found["notices"]),
        damaged=tuple(found["damaged"]),
    )


def _find(
    store: CheckpointStore, facts: RunFacts, math: TrainingMath, world_size: int
) -> tuple[Snapshot | None, dict[str, Any] | None]:
    step, damaged = store.newest_intact()
    if step is None:
        if not damaged:
            return None, None
        raise ShardtuneError(
            f"Every checkpoint in {store.folder} is damaged.",
            why="; ".join(map(str, damaged)),
            fix="Start over with --resume never; the folder is not changed.",
        )
    with store.reading(step) as folder:
        snapshot = read_snapshot(folder)
    if "metrics" not in snapshot.trainer:
        raise UserInputError(
            f"The checkpoint {store.path(step)} was written by an older version of shardtune.",
            why="What the training loop keeps between two steps has changed since.",
            fix="Finish the run with that version, or start a new one: --resume never.",
        )
    changed = _judge(snapshot.trainer, facts, math)
    for one in damaged:  # only once it is certain that the run resumes
        store.set_aside(one.step)
    return snapshot, {
        "step": step,
        "path": str(store.path(step)),
        "trainer": snapshot.trainer,
        "adapter": {name: tensor_spec(tensor) for name, tensor in snapshot.adapter.items()},
        "optimizer": {name: tensor_spec(tensor) for name, tensor in snapshot.optimizer.items()},
        "rng": [b64encode(state).decode("ascii") for state in snapshot.rng],
        "notices": _notices(changed, snapshot.trainer["batch"], facts, world_size),
        "damaged": list(map(str, damaged)),
    }


def _judge(trainer: dict[str, Any], facts: RunFacts, math: TrainingMath) -> list[Change]:
    """What changed and is allowed; raises on what is not."""
    changed = changes(trainer["settings"], facts.settings)
    refused = [str(change) for change in changed if change.verdict.kind == "refused"]
    if trainer["data"] != facts.data and not any(line.startswith("data.") for line in refused):
        refused.append("the data: the same settings now give different rows (its files or the tokenizer changed)")
    if refused:
        raise UserInputError(
            "The run cannot resume with this config.",
            why="\n".join(["These changes would make it another run:", *(f"  {line}" for line in refused)]),
            fix="Revert them, or start a new run: --resume never.",
            code="data-changed" if len(refused) == 1 and refused[0].startswith("the data:") else "cannot-resume",
        )
    _refuse_another_batch(trainer["batch"], facts.batch)
    if trainer["step"] > math.steps:
        raise UserInputError(
            f"The run is at step {trainer['step']}, past the {math.steps} steps this config asks for.",
            fix="Raise train.max_steps or train.num_train_epochs, or start a new run: --resume never.",
            code="cannot-resume",
        )
    return changed


def _refuse_another_batch(old: dict[str, int], new: dict[str, int]) -> None:
    if old["effective"] == new["effective"]:
        return
    across = new["per_device"] * new["processes"]
    if old["effective"] % across == 0:
        fix = f"Set train.gradient_accumulation_steps: {old['effective'] // across}."
    else:
        fits = [size for size in range(new["per_device"], 0, -1) if old["effective"] % (size * new["processes"]) == 0]
        fix = (
            f"Set train.per_device_train_batch_size: {fits[0]} and train.gradient_accumulation_steps: "
            f"{old['effective'] // (fits[0] * new['processes'])}."
            if fits
            else f"Use a number of processes that divides {old['effective']}."
        )
    raise UserInputError(
        f"Cannot resume: the effective batch would change from {old['effective']} to {new['effective']} rows.",
        why=f"It was {_product(old)} and is now {_product(new)} (per device × processes × accumulation): steps would "
        "no longer match.",
        fix=f"{fix} Or start a new run: --resume never.",
        code="cannot-resume",
    )


def _product(batch: dict[str, int]) -> str:
    return f"{batch['per_device']} × {batch['processes']} × {batch['accumulation']}"


def _notices(changed: list[Change], old: dict[str, int], facts: RunFacts, world_size: int) -> list[str]:
    lines = [str(change) for change in changed]
    if old["processes"] != world_size:
        lines.append(
            f"processes: {old['processes']} → {world_size} (same rows in the same order, {old['effective']} per step; "
            "sums are rounded differently, and dropout differs)"
        )
    elif old != facts.batch:
        lines.append(f"batch: {_product(old)} → {_product(facts.batch)} (same rows per step, summed differently)")
    return lines
