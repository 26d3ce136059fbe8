"""Which checkpoint is the best, and how sure is that? Evaluations beside what is on the disk; no torch, no tensors."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from shardtune.checkpoint.final import FINAL, DamagedFinal, FinalSource, damaged_final, has_weights, source_of
from shardtune.checkpoint.store import CheckpointStore, DamagedCheckpoint
from shardtune.errors import UserInputError
from shardtune.report.history import RunHistory
from shardtune.report.noise import Difference, Groups, difference, interval_of
from shardtune.report.read import Event, listed, number, whole
from shardtune.report.settings import bare_settings

Weights = Literal["checkpoint", "final", "damaged", "deleted", "not saved"]


@dataclass(frozen=True)
class Metric:
    """A number of an evaluation by which checkpoints can be ranked."""

    name: str
    label: str
    column: str
    lower_is_better: bool


METRICS = {
    "loss": Metric("loss", "eval loss", "eval loss", True),
    "token_accuracy": Metric("token_accuracy", "token accuracy", "accuracy", False),
}
_UNRANKED = {
    "entropy": "It says how sure the model is of its predictions, not how right: neither lower nor higher is better",
    "tokens": "It is the size of the evaluation, the same at every step",
    "perplexity": "It is exp(loss): the order is the same",
    "eval_loss": "`eval` events name it loss",
    "mean_token_accuracy": "`eval` events name it token_accuracy",
    "accuracy": "`eval` events name it token_accuracy",
}


def metric_named(name: str) -> Metric:
    """Raises:
    UserInputError: there is none by which checkpoints can be ranked.
    """
    if name in METRICS:
        return METRICS[name]
    near = difflib.get_close_matches(name, METRICS, n=1)
    why = _UNRANKED.get(name, f"Did you mean {near[0]}?" if near else "`eval` events have no such number")
    raise UserInputError(
        f"--metric {name}: checkpoints are not ranked by it.",
        why=why if why.endswith("?") else f"{why}.",
        fix=f"Give {' or '.join(METRICS)}.",
    )


@dataclass(frozen=True)
class Evaluation:
    """One evaluation that counts: of steps that a restart or a rollback repeated, the last attempt.

    Attributes:
        interval: Half the width of the 95 % interval of `value` (`noise`); None where it is not known.
        train_loss: Mean of the logged training loss since the evaluation before.
        weights: Where this step's weights are: in a `checkpoint`, in `final` alone, nowhere any more (`deleted`).
        gap: `value` minus that of `Best.reference`, all of them together at 95 %; None where its noise is not known,
            and for the reference.
    """

    step: int
    value: float
    groups: Groups | None
    interval: float | None
    train_loss: float | None
    weights: Weights
    gap: Difference | None = None

    @property
    def is_available(self) -> bool:
        return self.weights in ("checkpoint", "final")


@dataclass(frozen=True)
class Overfitting:
    """From `onset` on every evaluation is worse than the best beyond the noise, while the training loss falls."""

    onset: int
    train_before: float
    train_after: float
    evaluations: int


@dataclass(frozen=True)
class Best:
    """The answer, and what it follows from.

    Attributes:
        evaluations: In order of steps.
        lowest: The best value of all, whether or not its weights are anywhere.
        reference: The best of those whose weights are there and intact, to which the others are compared; None: there
            is none.
        chosen: The same, or the earliest of its ties where that was asked for.
        saved: The same, or else the best of those that have an intact checkpoint: `chosen` is in `final/` alone.
        ties: Others with weights that cannot be told apart from `reference`, earliest first.
        damaged: Checkpoints passed over.
        final: What `final/` is of, where it is known.
        damaged_final: What is wrong with that; None: nothing is, or it is not there.
    """

    run: Path
    metric: Metric
    evaluations: tuple[Evaluation, ...]
    lowest: Evaluation
    reference: Evaluation | None
    chosen: Evaluation | None
    saved: Evaluation | None
    ties: tuple[Evaluation, ...]
    damaged: tuple[DamagedCheckpoint, ...]
    overfitting: Overfitting | None
    final: FinalSource | None
    damaged_final: DamagedFinal | None

    @property
    def is_tie(self) -> bool:
        """Whether `chosen` is not the best value, but an earlier step that ties with it."""
        return self.chosen is not None and self.reference is not None and self.chosen.step != self.reference.step

    @property
    def path(self) -> Path | None:
        """The folder of the chosen weights."""
        if self.chosen is None:
            return None
        if self.chosen.weights == "final":
            return self.run / FINAL
        return CheckpointStore(self.run / "checkpoints", keep=None).path(self.chosen.step)


def best_of(run: RunHistory, metric: Metric, *, earliest_tie: bool = False) -> Best:
    """The best checkpoint of a run by its evaluations.

    Raises:
        UserInputError: nothing was evaluated, or not by this metric.
    """
    store = CheckpointStore(run.folder / "checkpoints", keep=None)
    final, broken_final = source_of(run.folder, store), damaged_final(run.folder, store)
    has_final = has_weights(run.folder / FINAL) and (broken_final is None or broken_final.has_adapter)
    _refuse(run, store, has_final=has_final)
    in_final = final.step if final is not None and has_final else None
    evaluations = _evaluations(run, metric, store, in_final)
    finite = [one for one in evaluations if math.isfinite(one.value)]
    if not finite:
        raise UserInputError(
            f"No evaluation of the run '{run.folder.name}' has a finite {metric.label}.",
            why=f"All {len(evaluations)} are NaN or infinite." if evaluations else f"None recorded {metric.name}.",
            fix="`shardtune report` shows where the loss became NaN." if evaluations else "Give --metric loss.",
        )
    sign = 1 if metric.lower_is_better else -1
    ranked = sorted(finite, key=lambda one: (sign * one.value, not one.is_available, one.step))
    reference, damaged = _first_intact(ranked, store, in_final)
    chosen = reference
    comparisons = max(1, len(finite) - 1)
    if earliest_tie and reference is not None:
        earlier = [tie for tie in _ties(ranked, reference, comparisons) if tie.step < reference.step]
        tie, more = _first_intact(earlier, store, in_final)
        chosen, damaged = tie or reference, damaged + more
    broken: dict[int, Weights] = {one.step: "final" if one.step == in_final else "damaged" for one in damaged}
    measured = {
        one.step: _against(replace(one, weights=broken.get(one.step, one.weights)), reference or ranked[0], comparisons)
        for one in evaluations
    }
    ranked = [measured[one.step] for one in ranked]
    saved = measured[chosen.step] if chosen is not None else None
    if saved is None or saved.weights == "final":
        saved, _ = _first_intact([one for one in ranked if one.weights == "checkpoint"], store, None)
    return Best(
        run=run.folder,
        metric=metric,
        evaluations=tuple(measured.values()),
        lowest=ranked[0],
        reference=measured[reference.step] if reference is not None else None,
        chosen=measured[chosen.step] if chosen is not None else None,
        saved=saved,
        ties=tuple(_ties(ranked, reference, comparisons)),
        damaged=tuple(sorted(damaged, key=lambda one: one.step)),
        overfitting=_overfitting(list(measured.values()), ranked[0], metric, comparisons),
        final=final,
        damaged_final=broken_final,
    )


def _refuse(run: RunHistory, store: CheckpointStore, *, has_final: bool) -> None:
    name = run.folder.name
    if run.script is not None:
        raise UserInputError(
            f"'{name}' is the run of a script (shardtune run): it has no evaluations of shardtune's.",
            why="What its script logs has names and directions of its own, and its checkpoints are the script's.",
            fix="`shardtune report` shows what it logged.",
        )
    if not len(run.evals) and not store.by_eval_loss():
        settings = bare_settings(run.folder)
        why, fix = _no_evaluation(settings)
        now = "`shardtune eval-loss --adapter` evaluates one checkpoint now." if store.steps() else ""
        if has_final:
            now = f"`shardtune eval {run.folder}` scores {FINAL}/ now."
        raise UserInputError(
            f"The run '{name}' has no evaluation{' yet' if run.facts.ending is None else ''}.",
            why=f"Checkpoints are ranked by evaluation, and {why}.",
            fix=f"{fix} {now}".strip(),
        )


def _no_evaluation(settings: Mapping[str, str]) -> tuple[str, str]:
    """Which setting of a run is the cause, and what to set in the next one."""
    equal = "train.eval_steps equal to train.save_steps, so that every checkpoint is evaluated."
    strategy, steps = settings.get("train.eval_strategy"), settings.get("train.eval_steps")
    if settings and not settings.get("data.val_split"):
        return "this run has no validation rows (data.val_split: null)", f"Set data.val_split, with {equal}"
    if strategy == "no":
        return "this run makes none (train.eval_strategy: no)", f"Set train.eval_strategy: steps, with {equal}"
    if strategy in ("auto", "steps") and steps:
        return (
            f"this run makes one every {steps} steps (train.eval_steps)",
            "Set train.eval_steps and train.save_steps to the same lower number.",
        )
    return "this run has none", f"Set data.val_split, with {equal}"


def _evaluations(run: RunHistory, metric: Metric, store: CheckpointStore, in_final: int | None) -> list[Evaluation]:
    steps, values = run.evals.get(metric.name)
    found = {int(step): float(value) for step, value in zip(steps, values, strict=True)}
    if metric.name == "loss":  # checkpoints copied from the run this one was started from, or whose events are lost
        found = {**{step: loss for step, loss in store.by_eval_loss() if step not in run.evals.steps}, **found}
    saved = set(store.steps())
    once_saved = {mark.step for mark in run.marks if mark.kind == "checkpoint"}
    evaluations, before = [], 0
    for step, value in sorted(found.items()):
        groups = _groups(run.eval_groups.get(step, {}), metric.name)
        weights: Weights = "checkpoint" if step in saved else "deleted" if step in once_saved else "not saved"
        if weights != "checkpoint" and step == in_final:
            weights = "final"
        trained = _train_loss(run, before, step)
        evaluations.append(Evaluation(step, value, groups, interval_of(groups), trained, weights))
        before = step
    return evaluations


def _groups(event: Event, metric: str) -> Groups | None:
    tokens = [whole(value) for value in listed(event.get("tokens"))]
    means = [number(value) for value in listed(event.get(metric))]
    counted = tuple(value for value in tokens if value)
    measured = tuple(value for value in means if value is not None)
    return Groups(counted, measured) if counted and len(counted) == len(tokens) == len(measured) == len(means) else None


def _train_loss(run: RunHistory, after: int, until: int) -> float | None:
    steps, losses = run.train.get("loss")
    part = losses[(steps > after) & (steps <= until)]
    part = part[np.isfinite(part)]
    return float(part.mean()) if len(part) else None


def _first_intact(
    ranked: Sequence[Evaluation], store: CheckpointStore, in_final: int | None
) -> tuple[Evaluation | None, list[DamagedCheckpoint]]:
    """The first whose weights are there, with every checksum compared; and damaged checkpoints up to it.

    Args:
        in_final: The step that an intact `final/` is of: its weights are there, even if its checkpoint is damaged.
    """
    damaged: list[DamagedCheckpoint] = []
    for one in ranked:
        if one.weights == "final":
            return one, damaged
        if one.weights == "checkpoint":
            found = tuple(damage for damage in store.verify(one.step) if damage.is_fatal)
            if not found:
                return one, damaged
            damaged.append(DamagedCheckpoint(one.step, found))
            if one.step == in_final:
                return one, damaged
    return None, damaged


def _against(one: Evaluation, best: Evaluation, comparisons: int) -> Evaluation:
    if one.step == best.step:
        return one
    return replace(one, gap=difference(one.value, one.groups, best.value, best.groups, comparisons))


def _ties(ranked: Sequence[Evaluation], chosen: Evaluation | None, comparisons: int) -> list[Evaluation]:
    if chosen is None:
        return []
    others = [_against(one, chosen, comparisons) for one in ranked if one.is_available and one.step != chosen.step]
    ties = [one for one in others if one.gap is not None and one.gap.is_within_noise]
    return sorted(ties, key=lambda one: one.step)


def _overfitting(
    evaluations: Sequence[Evaluation], lowest: Evaluation, metric: Metric, comparisons: int
) -> Overfitting | None:
    """Of the evaluations after the best value: the first from which on all are worse than it, beyond the noise.

    Without a known noise none is: every later value is worse than the best, whatever happens. Nor is a loss that is
    not finite: that is divergence.
    """
    later = [_against(one, lowest, comparisons) for one in evaluations if one.step > lowest.step]
    begin = len(later)
    while begin and (gap := later[begin - 1].gap) is not None and not gap.is_within_noise:
        begin -= 1
    tail = later[begin:]
    trained = [one.train_loss for one in tail if one.train_loss is not None]
    if not trained or lowest.train_loss is None:
        return None
    after = sum(trained) / len(trained)
    if after >= lowest.train_loss:
        return None  # it rises as well: that is not overfitting
    return Overfitting(tail[0].step, lowest.train_loss, after, len(tail))
