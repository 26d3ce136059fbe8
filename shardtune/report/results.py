"""What are the results? The few numbers by which a run is judged, each with how it was counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardtune.report import formatting
from shardtune.report.columns import Columns, Numbers
from shardtune.report.history import RunHistory
from shardtune.report.metrics import Metric, main_metric
from shardtune.report.read import mapping, number, whole
from shardtune.report.status import Status, status_of


@dataclass(frozen=True)
class Results:
    """None: unknown."""

    status: Status
    step: int
    steps: int | None
    first_loss: float | None
    last_loss: float | None
    best_eval: tuple[int, float] | None
    last_eval: tuple[int, float] | None
    evaluations: int
    tokens: int | None
    tokens_per_second: float | None
    step_seconds: float | None
    seconds: float | None
    starts: int
    mfu: float | None
    tflops: float | None
    gpu_peak: tuple[int, float] | None
    host_peak: tuple[int, float] | None
    metrics: tuple[Metric, ...]
    samples_per_second: float | None


def results_of(run: RunHistory, now: float) -> Results:
    _, losses = run.train.get("loss")
    eval_steps, evals = run.evals.get("loss")
    finite = np.isfinite(evals)
    best = int(np.where(finite, evals, np.inf).argmin()) if finite.any() else None
    tokens = run.train.last("tokens")
    plan = mapping(mapping(run.facts.plan).get("math"))
    return Results(
        status=status_of(run.folder, run.liveness, now, run.failure),
        step=run.last_step,
        steps=whole(plan.get("steps")),
        first_loss=float(losses[0]) if len(losses) else None,
        last_loss=float(losses[-1]) if len(losses) else None,
        best_eval=(int(eval_steps[best]), float(evals[best])) if best is not None else None,
        last_eval=(int(eval_steps[-1]), float(evals[-1])) if len(evals) else None,
        evaluations=len(evals),
        tokens=int(tokens) if tokens is not None and np.isfinite(tokens) else None,
        tokens_per_second=_median([run.train.get("tokens_per_second")[1]]),
        step_seconds=_median([columns.get("seconds.step")[1] for columns in run.profile.values()]),
        seconds=_wall(run),
        starts=len(run.facts.starts),
        mfu=_median([columns.get("mfu")[1] for columns in run.profile.values()]),
        tflops=_median([columns.get("tflops")[1] for columns in run.profile.values()]),
        gpu_peak=_most(run.profile, "memory.peak"),
        host_peak=_most(run.profile, "host.rss") or _most(run.usage, "host.rss"),
        metrics=tuple(run.metrics.all()),
        samples_per_second=_median([run.samples_per_second()[1]]),
    )


def _wall(run: RunHistory) -> float | None:
    if run.first_time is None or run.last_time is None:
        script = run.script
        return script.ended - script.started if script and script.ended and script.started else None
    return run.last_time - run.first_time


def _median(columns: list[Numbers]) -> float | None:
    """Without the first step of each: it compiles, allocates and warms up."""
    parts = [column[1:] if len(column) > 1 else column for column in columns if len(column)]
    together = np.concatenate(parts) if parts else np.empty(0)
    together = together[np.isfinite(together)]
    return float(np.median(together)) if len(together) else None


def _most(by_rank: Mapping[int, Columns], name: str) -> tuple[int, float] | None:
    """(rank, value) of the rank with the most."""
    found = []
    for rank, columns in by_rank.items():
        values = columns.get(name)[1]
        if len(values):
            found.append((float(values.max()), rank))
    return (max(found)[1], max(found)[0]) if found else None


def tiles(run: RunHistory, results: Results) -> list[dict[str, str]]:
    """(name, value, note) of each tile at the top of a run's page; what is not known has no tile."""
    if run.script is None:
        found = [_steps_tile(run, results), _loss_tile(results), *_eval_tiles(results)]
    else:  # which need not have any steps
        found = [*([_steps_tile(run, results)] if results.step else []), *_metric_tiles(results)]
    if results.tokens is not None:
        rate = results.tokens_per_second
        found.append(
            _tile(
                "tokens",
                formatting.short(results.tokens),
                f"{formatting.short(rate)} tok/s over all ranks, median" if rate else "all ranks",
            )
        )
    found += _samples_tile(run, results)
    if results.step_seconds is not None and run.script is not None:
        found.append(_tile("step time", formatting.seconds(results.step_seconds), _waiting(run)))
    if results.seconds is not None:
        starts = (
            f"{results.starts} starts" if results.starts > 1 else "first to last event" if run.ranks else "start to end"
        )
        found.append(_tile("time", formatting.clock(results.seconds), starts))
    if results.mfu is not None:
        found.append(_tile("MFU", formatting.percent(results.mfu), "per rank, median of all steps"))
    elif results.tflops is not None:
        value, unit = formatting.operations(results.tflops).split()
        found.append(_tile(unit, value, "per rank, median of all steps"))
    for name, most in (("GPU memory", results.gpu_peak), ("host memory", results.host_peak)):
        if most is not None and not (name == "host memory" and results.gpu_peak is not None):
            found.append(
                _tile(name, formatting.memory(most[1]), f"peak, rank {most[0]}" if len(run.ranks) > 1 else "peak")
            )
    return [tile for tile in found if tile]


def _tile(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _steps_tile(run: RunHistory, results: Results) -> dict[str, str]:
    epoch = run.train.last("epoch")
    note = f"of {results.steps:,}" if results.steps else ""
    if epoch is not None and np.isfinite(epoch):
        note += f"{', ' if note else ''}epoch {epoch:.3g}"
    return _tile("steps", f"{results.step:,}", note)


def _loss_tile(results: Results) -> dict[str, str]:
    first, last = results.first_loss, results.last_loss
    if last is None or first is None:
        return _tile("loss", "–", "no step logged yet")
    return _tile("loss", formatting.loss(last), f"started at {formatting.loss(first)}")


def _eval_tiles(results: Results) -> list[dict[str, str]]:
    if results.last_eval is None:
        return []
    step, value = results.last_eval
    found = [_tile("final evaluation loss", formatting.loss(value), f"step {step:,}")]
    if results.best_eval is not None and results.evaluations > 1:
        step, value = results.best_eval
        note = f"step {step:,}, best of {results.evaluations} evaluations"
        found.append(_tile("best evaluation loss", formatting.loss(value), note))
    return found


def _metric_tiles(results: Results) -> list[dict[str, str]]:
    """The one by which lists show the run, and its loss."""
    by_name = {metric.name: metric for metric in results.metrics}
    names = dict.fromkeys(name for name in (main_metric(dict.fromkeys(by_name, 0.0)), "loss") if name in by_name)
    return [
        _tile(formatting.plain(name, 80), formatting.value(by_name[name].last[1]), _since(by_name[name]))
        for name in names
    ]


def _samples_tile(run: RunHistory, results: Results) -> list[dict[str, str]]:
    by_rank = run.by_rank("samples_per_second")
    rate, of = results.samples_per_second, formatting.count(len(by_rank), "rank") + " together"
    if rate is None:
        rate, of = _median([y for _, y in by_rank.values()]), "per rank"
    name = f"{formatting.plain(run.sample_unit, 40)}/s"
    return [_tile(name, formatting.short(rate), f"{of}, median of the steps")] if rate is not None else []


def _since(metric: Metric) -> str:
    first = f", {formatting.value(metric.first[1])} at step {metric.first[0]:,}" if len(metric.x) > 1 else ""
    return f"step {metric.last[0]:,}{first}"


def _waiting(run: RunHistory) -> str:
    waits, steps = (_median([y for _, y in run.by_rank(f"seconds.{name}").values()]) for name in ("data", "step"))
    share = f", {formatting.percent(waits / steps)} waiting for data" if waits is not None and steps else ""
    return f"median{share}"


def remaining(run: RunHistory, results: Results) -> float | None:
    """Seconds left of a run that is running: the pace since its last start, times the remaining steps."""
    if results.status.state != "running" or not results.steps or len(run.train) < 2 or not run.facts.starts:
        return None
    began = number(run.facts.starts[-1].get("time"))
    mine = [i for i, at in enumerate(run.train.times) if began is None or at >= began]
    if len(mine) < 2:
        return None
    first, last = mine[0], mine[-1]
    steps = run.train.steps[last] - run.train.steps[first]
    took = run.train.times[last] - run.train.times[first]
    return took / steps * (results.steps - run.train.steps[last]) if steps > 0 else None
