"""How do runs differ? Their curves on the same axes, their results, and the settings that differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.report import formatting, tables
from shardtune.report.charts import (
    Chart,
    Series,
    downsampling_note,
    metric_chart,
    metric_ids,
    metric_look,
    samples_chart,
)
from shardtune.report.columns import Numbers
from shardtune.report.downsampling import Curve, downsample
from shardtune.report.history import RunHistory
from shardtune.report.metrics import Metric
from shardtune.report.results import Results, results_of
from shardtune.report.settings import Setting, differences, read_settings
from shardtune.report.view import View, notes, written

# The charts of a comparison, without their curves.
_OVERLAID = (
    Chart("loss", "Learning", "Training loss", ".4~f", "", "Mean between two log lines.", axis="loss", can_smooth=True,
          can_log=True),
    Chart("eval", "Learning", "Evaluation loss", ".4~f", "", "Compares only on the same validation rows.",
          axis="loss", can_log=True),
    Chart("grad_norm", "Learning", "Gradient norm", ".4~g", "", "Before clipping.", axis="L2 norm", can_smooth=True,
          can_log=True),
    Chart("learning_rate", "Learning", "Learning rate", ".3~e", axis="learning rate", from_zero=True),
    Chart("throughput", "Speed", "Tokens per second, all ranks", ".3s", " tok/s", "Real tokens, wall time.",
          axis="tok/s, all ranks", can_smooth=True, from_zero=True),
    Chart("mfu", "Speed", "Model FLOPs utilization", ".1f", " %", "Mean of all ranks.", axis="MFU, %", can_smooth=True,
          from_zero=True),
    Chart("step_seconds", "Speed", "Step time", ".3~g", " s", "The slowest rank.", axis="seconds per step",
          can_smooth=True, from_zero=True),
    Chart("gpu_memory", "Memory", "GPU memory, peak", ".3~g", " GiB", "The rank with the most.", from_zero=True),
    Chart("host_memory", "Memory", "Host memory", ".3~g", " GiB", "The rank with the most.", from_zero=True),
)  # fmt: skip
_GROUPS = ("Learning", "Metrics", "Speed", "Memory")
_AXIS_POINTS = 500  # between which a step's position is interpolated
_OF_RANKS: dict[str, tuple[str, float, Callable[..., Any]]] = {
    "mfu": ("mfu", 100.0, np.nanmean),
    "step_seconds": ("seconds.step", 1.0, np.nanmax),
    "gpu_memory": ("memory.peak", 1 / (1 << 30), np.nanmax),
    "host_memory": ("host.rss", 1 / (1 << 30), np.nanmax),
}


def compare_view(runs: Sequence[RunHistory], now: float) -> View:
    """Several runs on the same axes: curves, results, and the settings that differ."""
    results = [results_of(run, now) for run in runs]
    names = _names([run.folder for run in runs])
    return {
        "kind": "compare",
        "is_script": all(run.script is not None for run in runs),
        "title": f"{len(runs)} runs compared",
        "runs": names,
        "charts": [chart.as_dict() for chart in _overlaid(runs, names)],
        "axes": [_axes(run) for run in runs],
        "results": _result_table(names, results),
        "metrics": _metric_table(names, results),
        "differences": _difference_table(names, _settings(runs)),
        "notes": [f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in notes(run)],
        "written": written(now),
    }


def _axes(run: RunHistory) -> dict[str, list[float]]:
    """Each step in tokens, and in hours since the first event: steps of different batch sizes do not compare."""
    if run.script is not None:
        return _script_axes(run)
    steps, tokens = run.train.get("tokens")
    spread = np.linspace(0, len(steps) - 1, min(len(steps), _AXIS_POINTS)) if len(steps) else np.empty(0)
    began = run.first_time or 0.0
    kept = [i for i in np.unique(spread.astype(int)) if np.isfinite(tokens[i])]
    times = [run.train.time_of(int(steps[i])) or began for i in kept]
    return {
        "step": [0, *(int(steps[i]) for i in kept)],
        "tokens": [0, *(int(tokens[i]) for i in kept)],
        "hours": [0, *(round((time - began) / 3600, 6) for time in times)],
    }


def _script_axes(run: RunHistory) -> dict[str, list[float]]:
    """A script has no tokens; its steps are as long as its profiles, or else its metrics, say."""
    profile = next((columns for _, columns in sorted(run.profile.items())), None)
    steps, times = (np.array(profile.steps), np.array(profile.times)) if profile is not None else run.metrics.times()
    spread = np.linspace(0, len(steps) - 1, min(len(steps), _AXIS_POINTS)) if len(steps) else np.empty(0)
    kept = np.unique(spread.astype(int))
    began = run.first_time or 0.0
    return {
        "step": [0, *(int(steps[i]) for i in kept)],
        "hours": [0, *(round((float(times[i]) - began) / 3600, 6) for i in kept)],
    }


def _names(folders: list[Path]) -> list[str]:
    """Their folders' names, with as much of the path as needed to distinguish them."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return [formatting.plain(name, 200) for name in names]


@dataclass(frozen=True)
class _Points:
    x: Numbers
    y: Numbers
    look: str = "line"


def _overlaid(runs: Sequence[RunHistory], names: list[str]) -> list[Chart]:
    found = [
        (chart, [_Points(*_column(run, chart.id), look="points" if chart.id == "eval" else "line") for run in runs])
        for chart in _OVERLAID
    ]
    found = sorted([*found, *_metrics(runs), *_samples(runs)], key=lambda pair: _GROUPS.index(pair[0].group))
    charts = [_overlay(chart, points, names) for chart, points in found]
    return [chart for chart in charts if chart.series]


def _overlay(chart: Chart, points: Sequence[_Points], names: list[str]) -> Chart:
    """One curve for each run that has any points."""
    buckets = max(250, min(1000, 4000 // max(1, len(points))))
    series: list[Series] = []
    curves: list[tuple[str, Curve]] = []
    for index, of_run in enumerate(points):
        if len(of_run.x):
            curve = downsample(of_run.x, of_run.y, buckets)
            series.append(Series(names[index], curve.x, curve.y, index, look=of_run.look))
            curves.append((names[index], curve))
    broken = [(x, f"{name}: {word} at step {x:,}") for name, curve in curves for x, word in curve.broken]
    return replace(chart, note=downsampling_note([curve for _, curve in curves]), series=series, broken=broken)


_NONE = _Points(np.empty(0), np.empty(0))


def _metrics(runs: Sequence[RunHistory]) -> list[tuple[Chart, list[_Points]]]:
    """What scripts logged under the same name."""
    of_runs = [{metric.name: metric for metric in run.metrics.all()} for run in runs]
    names = list(dict.fromkeys(name for metrics in of_runs for name in metrics))
    found = []
    for id_, name in zip(metric_ids(names), names, strict=True):
        chart = metric_chart(id_, next(metrics[name] for metrics in of_runs if name in metrics))
        points = [
            _Points(one.x, one.y, metric_look(one, run.last_step)) if (one := metrics.get(name)) else _NONE
            for run, metrics in zip(runs, of_runs, strict=True)
        ]
        found.append((replace(chart, about="As each script logged it."), points))
    return found


def _samples(runs: Sequence[RunHistory]) -> list[tuple[Chart, list[_Points]]]:
    """Of scripts that count their samples; only the same unit compares."""
    found = []
    for unit in dict.fromkeys(run.sample_unit for run in runs if run.by_rank("samples_per_second")):
        points = [_Points(*run.samples_per_second()) if run.sample_unit == unit else _NONE for run in runs]
        chart = samples_chart(unit)
        found.append((replace(chart, id=metric_ids([f"samples {unit}"])[0]), points))
    return found


def _column(run: RunHistory, id_: str) -> tuple[Numbers, Numbers]:
    if id_ == "eval":
        return run.evals.get("loss")
    if id_ not in _OF_RANKS:
        return run.train.get("tokens_per_second" if id_ == "throughput" else id_)
    name, scale, together = _OF_RANKS[id_]
    columns = [columns.get(name) for columns in run.profile.values()]
    columns = [(x, y) for x, y in columns if len(x)]
    if not columns:
        return np.empty(0), np.empty(0)
    steps = np.unique(np.concatenate([x for x, _ in columns]))
    rows = np.full((len(columns), len(steps)), np.nan)
    for row, (x, y) in zip(rows, columns, strict=True):
        row[np.searchsorted(steps, x)] = y
    with warnings.catch_warnings():  # numpy warns about steps at which no rank has a number; they stay NaN, and visible
        warnings.simplefilter("ignore", RuntimeWarning)
        return steps, together(rows, axis=0) * scale


def _result_table(names: list[str], results: list[Results]) -> tables.Table:
    best = min((r.best_eval[1] for r in results if r.best_eval is not None), default=None)
    rows: list[list[tables.Cell]] = []
    for name, r in zip(names, results, strict=True):
        lowest = r.best_eval is not None and r.best_eval[1] == best and len(results) > 1
        evaluated = f"{formatting.loss(r.best_eval[1])} (step {r.best_eval[0]:,})" if r.best_eval else ""
        rows.append(
            [
                {"text": name, "tone": "run"},
                {"text": r.status.state, "tone": f"state {r.status.state}"},
                f"{r.step:,}" + (f" of {r.steps:,}" if r.steps else ""),
                formatting.loss(r.last_loss) if r.last_loss is not None else "",
                {"text": evaluated, "tone": "best" if lowest else ""},
                formatting.short(r.tokens) if r.tokens is not None else "",
                formatting.short(r.tokens_per_second) if r.tokens_per_second is not None else "",
                formatting.short(r.samples_per_second) if r.samples_per_second is not None else "",
                formatting.seconds(r.step_seconds)
                if r.step_seconds is not None and (r.metrics or r.samples_per_second)
                else "",
                formatting.percent(r.mfu) if r.mfu is not None else "",
                formatting.memory(r.gpu_peak[1]) if r.gpu_peak else "",
                formatting.clock(r.seconds) if r.seconds is not None else "",
            ]
        )
    heads = [
        "run",
        "status",
        "steps",
        "last loss",
        "best evaluation loss",
        "tokens",
        "tok/s, all ranks",
        "samples/s, all ranks",
        "step time",
        "MFU",
        "GPU peak",
        "time",
    ]
    mfu = any(r.mfu is not None for r in results)
    note = "Rates and MFU are medians over the run; MFU is per rank." if mfu else "Rates are medians over the run."
    return tables.without_empty(tables.table(heads, rows, numbers="  nnnnnnnnnn", note=note))


def _metric_table(names: list[str], results: list[Results]) -> tables.Table | None:
    """The last value of what scripts logged, with its range."""
    of_runs = [{metric.name: metric for metric in r.metrics} for r in results]
    metrics = dict.fromkeys(name for of_run in of_runs for name in of_run)
    rows: list[list[tables.Cell]] = [
        [formatting.plain(name, 120), *(_last_and_range(of_run.get(name)) for of_run in of_runs)] for name in metrics
    ]
    if not rows:
        return None
    note = "Last value, and in brackets the lowest and the highest."
    return tables.table(["metric", *names], rows, numbers=f" {'n' * len(names)}", note=note)


def _last_and_range(metric: Metric | None) -> str:
    if metric is None:
        return ""
    ends = (metric.lowest, metric.highest)
    spread = " – ".join(formatting.value(end[1]) for end in ends if end is not None)
    return f"{formatting.value(metric.last[1])} at step {metric.last[0]:,} ({spread or 'not finite'})"


def _settings(runs: Sequence[RunHistory]) -> list[list[Setting]]:
    """Of each run; where all are of scripts, their command lines."""
    if all(run.script is not None for run in runs):
        return [[Setting("command", run.script.line, "")] if run.script is not None else [] for run in runs]
    return [read_settings(run.folder) for run in runs]


def _difference_table(names: list[str], settings: list[list[Setting]]) -> tables.Table | None:
    """Between runs that have a config.yaml; a plain Trainer with our profiler has none."""
    known = [(name, of_run) for name, of_run in zip(names, settings, strict=True) if of_run]
    if len(known) < min(2, len(names)):
        return None
    found = differences([of_run for _, of_run in known])
    rows: list[list[tables.Cell]] = [
        [
            {"text": formatting.plain(path, 200), "tone": "mono"},
            *({"text": formatting.plain(v, 300), "tone": "mono"} if v is not None else "–" for v in values),
        ]
        for path, values in found
    ]
    note = "All other settings are the same." if found else "All settings are the same."
    if without := [name for name, of_run in zip(names, settings, strict=True) if not of_run]:
        note += f" Without a config.yaml: {', '.join(without)}."
    return tables.table(["setting", *(name for name, _ in known)], rows, note=note)
