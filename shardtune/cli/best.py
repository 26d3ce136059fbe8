"""`shardtune best RUN`: the best checkpoint, with reasons; points to it, and makes `final/` it when asked."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shardtune.cli.options import RunsDir, complete_run

if TYPE_CHECKING:
    from shardtune.report.best import Best
    from shardtune.report.history import RunHistory
    from shardtune.run.best import Recorded


def best(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Id or folder of a run.", show_default=False, autocompletion=complete_run),
    ],
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="Metric to compare evaluations by: loss or token_accuracy.")
    ] = "loss",
    earliest_tie: Annotated[
        bool,
        typer.Option("--earliest-tie", help="Choose the earliest checkpoint that is tied with the best."),
    ] = False,
    to_final: Annotated[
        bool, typer.Option("--to-final", help="Publish that checkpoint in final/; finished runs only.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every evaluation.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show which checkpoint of RUN is the best, and why: its evaluations, their noise, ties and overfitting.

    Also makes it what `--checkpoint best` and `--resume best` refer to, until the run saves again. A run in progress is
    not modified.

    Exit codes: 0 there is a best checkpoint; 1 no evaluated step has intact weights; 2 no such run, or no evaluations.
    """
    from rich.console import Console

    from shardtune.report import best_text
    from shardtune.report.best import best_of, metric_named
    from shardtune.report.history import RunHistory
    from shardtune.report.runs import find_run
    from shardtune.terminal import say

    ranked_by = metric_named(metric)
    history = RunHistory(find_run(run, runs_dir), lowest_rank_alone=True)
    history.update()
    found = best_of(history, ranked_by, earliest_tie=earliest_tie)
    console = Console(stderr=as_json)
    if not as_json:
        best_text.show(console, found)
    if earliest_tie and found.reference is not None and not found.is_tie:
        unknown = found.reference.interval is None
        why = "the noise is not known" if unknown else "no earlier checkpoint ties with the best"
        say(console, "notice", f"--earliest-tie has no effect: {why}.", "yellow")
    done = None if dry_run or found.chosen is None else _record(found, history, to_final)
    if as_json:
        print(json.dumps(best_text.as_json(found) | {"pointer": done.pointer if done else None}, indent=1))
    else:
        say(console, "final", done.final if done is not None and done.final else best_text.final_line(found))
        say(console, "pointer", done.pointer if done is not None else "not written")
    if done is not None and done.kept is not None:
        say(console, "kept", f"the earlier final/, whose weights are in no checkpoint: {done.kept}")
    sys.exit(0 if found.chosen is not None else 1)


def _record(found: Best, history: RunHistory, to_final: bool) -> Recorded:
    from shardtune.run.best import BestStep, record_best

    chosen, saved = found.chosen, found.saved
    assert chosen is not None
    if saved is None:
        return record_best(found.run, None, to_final=to_final, in_final=chosen.step)
    is_chosen = saved.step == chosen.step
    step = BestStep(
        saved.step, found.metric.name, saved.value, history.eval_loss_at(saved.step), found.is_tie and is_chosen
    )
    return record_best(found.run, step, to_final=to_final, in_final=None if is_chosen else chosen.step)
