"""How is an evaluation shown on a terminal? A row for each metric: base, tuned, and what lies between them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from shardtune.evaluation.metrics import Metric, Side
from shardtune.evaluation.result import Evaluation
from shardtune.report.evaluations import with_interval
from shardtune.terminal import count, say

_WIDE = 104  # columns, from which on an interval stands behind its number
_STYLES = {"better": "green", "worse": "red"}


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    sides: list[Side] = list(evaluation.about["sides"])
    if evaluation.metrics:
        data = evaluation.about["data"]
        title = f"{count(data['rows'], 'row')}, {data['supervised_tokens']:,} supervised tokens"
        answered = evaluation.about["generation"]
        if answered is not None and answered["rows"] != data["rows"]:
            title += f"; {answered['rows']:,} answered"
        _print(console, title, sides, [(metric.title, metric) for metric in evaluation.metrics])
    if evaluation.tasks:
        named = [
            (f"{one.task}: {one.metric.title}" + (f" ({one.filter})" if one.filter != "none" else ""), one.metric)
            for one in evaluation.tasks
        ]
        _print(console, "lm-evaluation-harness", sides, named)
    for note in evaluation.notes:
        say(console, "note", note)


def _print(console: Console, title: str, sides: Sequence[Side], metrics: Sequence[tuple[str, Metric]]) -> None:
    between = " " if console.width >= _WIDE else "\n"
    console.print(f"\n{title}; 95 % intervals in brackets", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", overflow="fold", min_width=10)
    for side in sides:
        table.add_column(side, justify="right", no_wrap=True)
    if len(sides) == 2:
        table.add_column("tuned − base", justify="right", no_wrap=True)
        table.add_column("", min_width=7)
    for name, metric in metrics:
        table.add_row(name, *_cells(metric, sides, between))
    unlimited = console.options.update(max_width=1000)
    for column in table.columns[1:]:  # not wrapped; rich would cut them
        column.min_width = max(Measurement.get(console, unlimited, cell).maximum for cell in column.cells)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
        return
    for name, metric in metrics:  # a narrow terminal: nothing is cut, each number has its line
        console.print(f"\n{name}", highlight=False, markup=False)
        for column, cell in zip(table.columns[1:], _cells(metric, sides, " "), strict=True):
            console.print(f"  {column.header!s:<12}  {cell}".rstrip(), highlight=False, soft_wrap=True)
    console.print()


def _cells(metric: Metric, sides: Sequence[Side], between: str) -> list[str]:
    """Base, tuned, their difference and the verdict, as far as they are there; with markup."""
    cells = [escape(with_interval(metric.sides[side].as_dict(), metric.kind, between)) for side in sides]
    if metric.difference is not None:
        shown = with_interval(metric.difference.as_dict(), metric.kind, between, signed=True)
        style = _STYLES.get(metric.verdict, "dim")
        cells += [escape(shown), f"[{style}]{metric.verdict}[/]" if metric.verdict else ""]
    return cells
