"""How is the best checkpoint shown, with its reasons? Lines and a table for a terminal, or JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from shardtune.checkpoint.final import FINAL
from shardtune.report.best import Best, Evaluation
from shardtune.report.noise import Difference
from shardtune.terminal import count, say

_MOST_ROWS = 24
_MOST_TIES = 8
_WIDEST = 60  # columns of the curve
_BARS = "▁▂▃▄▅▆▇█"
_NOT_SAVED = "not saved"


def show(console: Console, best: Best) -> None:
    """The curve, the evaluations, and what follows from them."""
    values = [one.value for one in best.evaluations]
    direction = "lower is better" if best.metric.lower_is_better else "higher is better"
    about = f"{best.metric.label}, {count(len(values), 'evaluation')}, {direction}"
    say(console, "metric", about)
    say(console, "curve", f"{values[0]:.4f} {curve(values)} {values[-1]:.4f}")
    say(console, "noise", noise_line(best))
    shown = _shown(best)
    console.print(_table(console, best, shown), highlight=False)
    if len(shown) < len(values):
        console.print(f"{len(shown)} of {len(values)} evaluations; --json has all.", highlight=False)
    for label, text in lines(best):
        say(console, label, text, "bold red" if label == "warning" else "bold")


def curve(values: Sequence[float]) -> str:
    """A line of bars, tall where the value is high; `!` where it is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    picked = values
    if len(values) > _WIDEST:
        picked = [values[round(i * (len(values) - 1) / (_WIDEST - 1))] for i in range(_WIDEST)]
    return "".join(
        _BARS[round((value - low) / span * 7) if span else 0] if math.isfinite(value) else "!" for value in picked
    )


def noise_line(best: Best) -> str:
    """Where the intervals come from, or why there are none."""
    reference = best.reference or best.lowest
    if reference.groups is None:
        return "not recorded: this evaluation has no `groups` (written since shardtune 0.2), so no difference is judged"
    if reference.interval is None:
        return (
            "not known: all validation rows were one batch; with a smaller train.per_device_eval_batch_size it is "
            "estimated from at least two"
        )
    groups, tokens = reference.groups, sum(reference.groups.tokens)
    few = (
        ""
        if len(groups.tokens) >= 8
        else "; so few groups give wide intervals: a smaller per_device_eval_batch_size helps"
    )
    return (
        f"± is a 95 % interval from {len(groups.tokens)} groups of the same rows, {tokens:,} tokens; differences from "
        f"the best are taken group by group, and their intervals hold all together{few}"
    )


def _shown(best: Best) -> list[Evaluation]:
    """All of a short run; of a longer one the ends, the neighbours of the best, and the rest evenly."""
    everyone = best.evaluations
    if len(everyone) <= _MOST_ROWS:
        return list(everyone)
    reference = {one.step for one in (best.reference, best.chosen, best.lowest) if one is not None}
    at = [i for i, one in enumerate(everyone) if one.step in reference]
    kept = {0, len(everyone) - 1, *at, *(i + 1 for i in at), *(i - 1 for i in at)}
    spare = _MOST_ROWS - len(kept)
    kept |= {round(i * (len(everyone) - 1) / (spare + 1)) for i in range(1, spare + 1)}
    return [one for i, one in enumerate(everyone) if i in kept]


def _table(console: Console, best: Best, shown: Sequence[Evaluation]) -> Table:
    has_noise = any(one.interval is not None for one in shown)
    has_train = any(one.train_loss is not None for one in shown)
    table = Table(box=None, pad_edge=False, padding=(0, 2 if console.width > 84 else 1, 0, 0))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column(best.metric.column, justify="right", no_wrap=True)
    if has_noise:
        table.add_column("±", justify="right", no_wrap=True)
        table.add_column("from the best", justify="right", no_wrap=True)
    if has_train:
        table.add_column("train loss", justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in shown:
        noise = [_number(one.interval), _difference(one.gap)] if has_noise else []
        train = [_number(one.train_loss)] if has_train else []
        table.add_row(f"{one.step:,}", _number(one.value), *noise, *train, one.weights, _mark(best, one))
    return table


def _mark(best: Best, one: Evaluation) -> str:
    if best.chosen is not None and one.step == best.chosen.step:
        return "[bold]chosen[/]" if best.is_tie else "[bold]best[/]"
    if best.reference is not None and one.step == best.reference.step:
        return "best"
    if one.step == best.lowest.step:
        return "lowest" if best.metric.lower_is_better else "highest"
    return "tie" if any(tie.step == one.step for tie in best.ties) else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _difference(gap: Difference | None) -> str:
    return "" if gap is None else f"{gap.value:+.4f} ± {gap.interval:.4f}"


def lines(best: Best) -> list[tuple[str, str]]:
    """(label, sentence) of each conclusion."""
    found: list[tuple[str, str]] = [("warning", f"damaged, and left out: {one}") for one in best.damaged]
    if best.damaged_final is not None:
        left_out = "" if best.damaged_final.has_adapter else ", and left out"
        found.append(("warning", f"damaged{left_out}: {best.damaged_final}"))
    if best.chosen is None:
        return [*found, ("best", _nothing(best))]
    found.append(("best", f"{_named(best.chosen, best)}: {best.path}"))
    found.append(("why", _why(best)))
    if unsaved := _unsaved(best):
        found.append(("unsaved", unsaved))
    if best.ties:
        found.append(("ties", _ties(best)))
    if best.overfitting is not None:
        found.append(("overfits", _overfits(best)))
    if best.lowest.step == 0:
        found.append(("untrained", "Step 0 is the model before training: training made it worse on these rows."))
    return found


def _named(one: Evaluation, best: Best) -> str:
    interval = f" ± {one.interval:.4f}" if one.interval is not None else ""
    return f"step {one.step:,}, {best.metric.label} {one.value:.4f}{interval}"


def _why(best: Best) -> str:
    available = sum(one.is_available for one in best.evaluations)
    extreme = "lowest" if best.metric.lower_is_better else "highest"
    how = f"the {extreme} {best.metric.label} of {count(available, 'evaluation')} whose weights are there"
    if best.is_tie and best.reference is not None:
        how = f"the earliest that cannot be told apart from step {best.reference.step:,}, {how} (--earliest-tie)"
    checked = "; every checksum matches" if best.chosen is not None and best.chosen.weights == "checkpoint" else ""
    return f"{how}{checked}"


def _nothing(best: Best) -> str:
    lowest = _named(best.lowest, best)
    why = _SAVE_AS_OFTEN if best.lowest.weights == "not saved" else f"Its checkpoint is {best.lowest.weights}."
    return f"none: no evaluated step has intact weights. The best value was at {lowest}. {why}"


_SAVE_AS_OFTEN = "Set train.save_steps equal to train.eval_steps, so that every evaluated step is saved."


def _unsaved(best: Best) -> str:
    """The best value of all is of weights that are not there."""
    one, chosen = best.lowest, best.reference
    if chosen is None or one.is_available or one.step in (chosen.step, 0) or one.weights == "damaged":
        return ""
    gap = one.gap
    judged = "" if gap is None else ", within the noise" if gap.is_within_noise else ", more than the noise"
    better = f"better by {abs(chosen.value - one.value):.4f}{judged}"
    fix = _SAVE_AS_OFTEN
    if one.weights == "deleted":
        fix = "Raise train.save_total_limit: only the lowest eval loss and the newest checkpoints are kept."
    return f"Step {one.step:,} was {better}, and its checkpoint was {one.weights}. {fix}"


def _ties(best: Best) -> str:
    steps = [f"{one.step:,}" for one in best.ties]
    some = ", ".join(steps[:_MOST_TIES]) + (f" and {len(steps) - _MOST_TIES} more" if len(steps) > _MOST_TIES else "")
    reference = best.reference
    assert reference is not None
    earlier = not best.is_tie and best.ties[0].step < reference.step
    hint = f"; --earliest-tie takes step {steps[0]}" if earlier else ""
    return f"the evaluation cannot tell step {reference.step:,} apart from {some}{hint}"


def _overfits(best: Best) -> str:
    found = best.overfitting
    assert found is not None
    return (
        f"from step {found.onset:,} on: {count(found.evaluations, 'evaluation')} worse than step {best.lowest.step:,} "
        f"beyond the noise, while the training loss fell from {found.train_before:.4f} to {found.train_after:.4f}. "
        "Train for fewer steps (train.early_stopping_patience ends a run by itself), or on more data."
    )


def final_line(best: Best) -> str:
    """What `final/` is, beside the best."""
    final, chosen = best.final, best.chosen
    if not (best.run / FINAL).is_dir():
        return f"{FINAL}/ is not there: it is written when training ends"
    if best.damaged_final is not None:
        is_saved = chosen is not None and chosen.weights == "checkpoint"
        return f"{FINAL}/ is damaged" + ("; --to-final writes it again, from the best checkpoint" if is_saved else "")
    if final is None:
        return f"{FINAL}/ does not say which step it is of; --to-final makes it the best"
    by = f", chosen by {final.metric}" if final.metric else ""
    if chosen is not None and final.step == chosen.step:
        return f"{FINAL}/ is that step{by}"
    return f"{FINAL}/ is step {final.step:,}{by}; --to-final makes it the best"


def as_json(best: Best) -> dict[str, Any]:
    """Everything, for scripts; numbers that JSON cannot represent are strings, as in events."""
    found = best.overfitting
    return {
        "run": str(best.run),
        "metric": best.metric.name,
        "lower_is_better": best.metric.lower_is_better,
        "best": _one(best.chosen) if best.chosen is not None else None,
        "path": str(best.path) if best.path is not None else None,
        "is_tie": best.is_tie,
        "best_of_all": _one(best.lowest),
        "ties": [one.step for one in best.ties],
        "overfitting": None if found is None else {
            "onset": found.onset, "evaluations": found.evaluations,
            "train_loss_before": found.train_before, "train_loss_after": found.train_after,
        },
        "damaged": [{"step": one.step, "damages": list(map(str, one.damages))} for one in best.damaged],
        "final": _final(best),
        "evaluations": [_one(one) for one in best.evaluations],
    }  # fmt: skip


def _final(best: Best) -> dict[str, Any] | None:
    """Its damages are listed here; `damaged` lists checkpoints."""
    final, damaged = best.final, best.damaged_final
    if final is None and damaged is None:
        return None
    return {
        "step": final.step if final is not None else None,
        "metric": final.metric if final is not None else None,
        "intact": damaged is None,
        "damages": [] if damaged is None else list(map(str, damaged.damages)),
    }


def _one(one: Evaluation) -> dict[str, Any]:
    gap = one.gap
    return {
        "step": one.step,
        "value": one.value if math.isfinite(one.value) else str(one.value),
        "interval": one.interval,
        "train_loss": one.train_loss,
        "weights": one.weights,
        "from_best": None if gap is None else {"value": gap.value, "interval": gap.interval, "paired": gap.paired},
    }
