"""What does the page show of a run? Plain data; report and dashboard draw the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtune import __version__
from shardtune.report import formatting, tables
from shardtune.report.charts import Chart, charts_of
from shardtune.report.evaluations import evaluations
from shardtune.report.header import ask_command, facts, scores
from shardtune.report.history import Mark, RunHistory
from shardtune.report.results import remaining, results_of, tiles
from shardtune.report.settings import Setting, read_settings

_MARK_KINDS = {
    "restart": "restarts", "checkpoint": "checkpoints", "notice": "notices", "warning": "warnings", "guard": "guards",
    "failure": "failures",
}  # fmt: skip
_MOST_MARKS = 400  # of one kind; more cannot be distinguished on a screen

View = dict[str, Any]


def run_view(run: RunHistory, now: float) -> View:
    """Everything the page of one run shows."""
    results, settings = results_of(run, now), read_settings(run.folder)
    charts = charts_of(run)
    left = remaining(run, results)
    return {
        "kind": "run",
        "is_script": run.script is not None,
        "title": formatting.plain(run.folder.name, 200),
        "folder": formatting.plain(str(run.folder), 1000),
        "status": results.status.state,
        "why": _sentence(formatting.plain(results.status.text, 600)),
        "advice": [formatting.plain(part, 2000) for part in results.status.advice],
        "progress": min(1.0, results.step / results.steps) if results.steps else None,
        "left": f"about {formatting.clock(left)} left" if left is not None else "",
        "ask": formatting.plain(ask_command(run, results.status.state), 2000),
        "facts": facts(run, settings),
        "tiles": [*tiles(run, results), *scores(run)],
        "charts": [chart.as_dict() for chart in charts],
        "ranks": _shown_ranks(charts),
        "marks": _marks(run) if run.script is None or results.step else [],
        "metrics": tables.metrics(results),
        "logs": tables.logs(run, results),
        "problems": tables.problems(run),
        "out_of_memory": tables.out_of_memory(run),
        "planned": tables.planned(run, results),
        "rank_table": tables.ranks(run),
        "checkpoints": tables.checkpoints(run),
        "evaluations": evaluations(run.folder),
        "samples": tables.samples(run),
        "data": tables.data(run),
        "adapters": tables.adapters(run),
        "config": _config(settings),
        "environment": tables.environment(run),
        "notes": notes(run),
        "written": written(now),
    }


def written(now: float) -> str:
    return f"shardtune {__version__}, {formatting.when(now)}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shown_ranks(charts: list[Chart]) -> list[int]:
    found = {series.rank for chart in charts for series in chart.series if series.rank is not None}
    return sorted(found) if len(found) > 1 else []


def _marks(run: RunHistory) -> list[View]:
    """What the timeline shows, by kind; of a kind with very many an even selection."""
    found, reported = [], run.reported_marks()
    for kind, name in _MARK_KINDS.items():
        marks = sorted((mark for mark in reported if mark.kind == kind), key=lambda mark: mark.step)
        shown = marks if len(marks) <= _MOST_MARKS else [marks[i] for i in _spread(len(marks))]
        if shown:
            points = [{"x": mark.step, "text": _short(mark)} for mark in shown]
            note = f"{len(shown):,} of {len(marks):,} shown" if len(shown) < len(marks) else ""
            found.append({"kind": kind, "name": name, "points": points, "note": note})
    return found


def _spread(count: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, count - 1, _MOST_MARKS)})


def _short(mark: Mark) -> str:
    message = formatting.plain(mark.text, 160).replace("\n", " ")
    return f"step {mark.step:,}: {message}"


def _config(settings: list[Setting]) -> list[View]:
    """Sections with their settings in the order of the file."""
    sections: dict[str, list[View]] = {}
    for setting in settings:
        section, _, name = setting.path.partition(".")
        sections.setdefault(section, []).append(
            {
                "name": formatting.plain(name or section, 200),
                "value": formatting.plain(setting.value, 2000),
                "origin": formatting.plain(setting.origin, 400),
                "is_default": setting.is_default,
            }
        )
    return [{"name": formatting.plain(name, 80), "settings": rows} for name, rows in sections.items()]


def notes(run: RunHistory) -> list[str]:
    """Notes about the event files themselves."""
    found = []
    if run.is_behind:
        found.append(f"Still reading the events: shown up to step {run.last_step:,}.")
    if run.unreadable:
        found.append(f"Skipped {formatting.count(run.unreadable, 'unreadable line')} of the event files.")
    if run.newer_version:
        found.append(
            f"Some events have schema version {run.newer_version}, which this version of shardtune does not fully know."
        )
    if run.unknown:
        names = ", ".join(formatting.plain(name, 60) for name, _ in run.unknown.most_common(5))
        found.append(f"Ignored {formatting.count(run.unknown.total(), 'event')} of unknown kinds: {names}.")
    if run.metrics.replaced:
        found.append(
            f"{formatting.count(run.metrics.replaced, 'value')} of metrics were logged at a step that had one "
            "already; the last one counts. `observe.steps` counts the steps."
        )
    if run.metrics.left_out:
        found.append(
            f"{formatting.count(len(run.metrics.left_out), 'metric')} are not shown: a script has too many names."
        )
    if not run.ranks:
        found.append("This run has no events.")
    return found
