"""Which charts does a run have? Each with its unit, how it was counted, and how many steps a point stands for."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from shardtune.report import formatting
from shardtune.report.columns import ABSENT, Columns, Numbers, together
from shardtune.report.downsampling import Curve, downsample, means
from shardtune.report.history import RunHistory
from shardtune.report.metrics import Metric
from shardtune.report.read import number

_BUCKETS = 1000  # of a single curve: two points each, about one per pixel on a wide screen
_SHARED_BUCKETS = 3200  # of all ranks' curves of one chart together: keeps the file small
_STACKED_BUCKETS = 300
_MOST_RANKS = 8  # curves that can be distinguished; beyond that, lowest, median and highest
_GIB = 1 << 30
_MOST_RARE = 50  # values of a metric that are drawn as points: an evaluation now and then
_TIME_UNITS = (
    ("seconds", 1, 1 / 20),
    ("minutes", 60, 3),
    ("hours", 3600, np.inf),
)  # for runs of less than so many hours


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        color: Index into the palette: the rank's, or the run's in a comparison.
        look: "line", "points" (joined), "faint" (undone by a restart or rollback) or "band" (an edge of the ranks).
        rank: The page can hide it by rank. None: of all ranks.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    look: str = "line"
    rank: int | None = None


@dataclass(frozen=True)
class Chart:
    """What the page draws.

    Args:
        format: How a value reads (d3), with `suffix` behind it.
        axis: Title of the y axis: what is counted, and its unit.
        over: What x counts: "step"; or "seconds", "minutes" or "hours" since the run's first event.
        can_smooth: A noisy rate or loss.
        about: How the numbers were counted.
        note: How the curve was downsampled.
        latest: The last value as text, of a chart with one curve.
        broken: (x, text) of values that are NaN or infinite.
        stars: (x, y, text) of points to mark.
    """

    id: str
    group: str
    title: str
    format: str
    suffix: str = ""
    about: str = ""
    note: str = ""
    axis: str = ""
    over: str = "step"
    can_smooth: bool = False
    latest: str = ""
    stacked: bool = False
    can_log: bool = False
    from_zero: bool = False
    series: list[Series] = field(default_factory=list)
    broken: list[tuple[float, str]] = field(default_factory=list)
    stars: list[tuple[float, float, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "axis": self.axis or self.suffix.strip()}


@dataclass(frozen=True)
class _PerRank:
    """A chart of one column of the profile, a curve per rank."""

    id: str
    group: str
    title: str
    column: str
    format: str
    suffix: str = ""
    scale: float = 1.0
    about: str = ""
    from_zero: bool = True
    axis: str = ""


_PER_RANK = (
    _PerRank(
        "rank_throughput", "Speed", "Tokens per second, per rank", "tokens_per_second", ".3s", " tok/s",
        about="Real tokens (no padding) of one rank over its step time.", axis="tok/s per rank",
    ),
    _PerRank(
        "mfu", "Speed", "Model FLOPs utilization", "mfu", ".1f", " %", 100,
        about="FLOPs that the training needs, over the chip's dense bf16 peak during the step.", axis="MFU, %",
    ),
    _PerRank(
        "tflops", "Speed", "Achieved FLOP/s, per rank", "tflops", ".3~g", " TFLOP/s",
        about="FLOPs that the training needs, over the step time, on one rank's device.",
    ),
    _PerRank(
        "step_seconds", "Speed", "Step time", "seconds.step", ".3~g", " s", axis="seconds per step",
        about="From the end of the previous step to the end of this one, without evaluation and saving.",
    ),
    _PerRank(
        "gpu_memory", "Memory", "GPU memory, peak", "memory.peak", ".3~g", " GiB", 1 / _GIB,
        about="Peak memory allocated to tensors on a rank's GPU so far.",
    ),
    _PerRank(
        "gpu_reserved", "Memory", "GPU memory, reserved", "memory.reserved", ".3~g", " GiB", 1 / _GIB,
        about="Memory reserved by PyTorch's allocator, used or not.",
    ),
    _PerRank(
        "host_memory", "Memory", "Host memory", "host.rss", ".3~g", " GiB", 1 / _GIB,
        about="Resident memory of each rank's process.",
    ),
    _PerRank("gpu_utilization", "Device", "GPU utilization", "gpu.utilization", ".0f", " %", axis="% of time",
             about="Share of time in which a kernel ran, as reported by the driver; not how efficient it was."),
    _PerRank("gpu_power", "Device", "GPU power", "gpu.power_watts", ".0f", " W"),
    _PerRank("gpu_temperature", "Device", "GPU temperature", "gpu.temperature_c", ".0f", " °C", from_zero=False),
    _PerRank("gpu_clock", "Device", "SM clock", "gpu.sm_clock_mhz", ".0f", " MHz", from_zero=False),
    _PerRank("cpu", "Device", "CPU usage of the process", "host.cpu_percent", ".0f", " %", axis="% of one core",
             about="100 % is one core."),
    _PerRank("gpu_memory_used", "Memory", "GPU memory in use", "gpu.memory_used", ".3~g", " GiB", 1 / _GIB,
             about="On the whole device, by any process, as reported by the driver."),
)  # fmt: skip
_SCRIPT_STEP = "From the end of the previous step to the end of this one, without what is inside of observe.phase."
_PHASES = {
    "data": "waiting for data", "forward": "forward", "backward": "backward", "optimizer": "optimizer",
    "collective": "waiting for other ranks (collective)",
}  # fmt: skip


def charts_of(run: RunHistory) -> list[Chart]:
    """Every chart the run has numbers for, in display order."""
    found = [
        _loss(run), _eval(run), _predictions(run, "token_accuracy"), _predictions(run, "entropy"), _grad_norm(run),
        _learning_rate(run), *_metrics(run), _throughput(run), *_samples(run),
    ]  # fmt: skip
    has_mfu = any("mfu" in columns.names for columns in run.profile.values())
    for spec in _PER_RANK:
        alone = len(run.profile) == 1 and spec.id == "rank_throughput" and "tokens_per_second" in run.train.names
        if not alone and not (spec.id == "tflops" and has_mfu):
            of_script = run.script is not None and spec.id == "step_seconds"
            found.append(_per_rank(replace(spec, about=_SCRIPT_STEP) if of_script else spec, run.by_rank(spec.column)))
        if spec.id == "step_seconds":
            found.append(_phases(run))
    found += [_over_time(run, spec) for spec in _PER_RANK if not run.by_rank(spec.column)]
    return [chart for chart in found if chart is not None]


def downsampling_note(curves: Sequence[Curve]) -> str:
    """`2,000 of 100,000 points are drawn …`, or nothing if all are; and how many are NaN or infinite."""
    thinned = [curve for curve in curves if curve.is_downsampled]
    sentences = []
    if thinned:
        most = max(thinned, key=lambda curve: curve.of)
        sentences.append(f"{len(most.x):,} of {most.of:,} points are drawn: the minimum and maximum of each interval.")
    breaks = sum(curve.breaks for curve in curves)
    if breaks:
        sentences.append(f"{breaks:,} values are NaN or infinite (✕).")
    return " ".join(sentences)


def _loss(run: RunHistory) -> Chart | None:
    x, y = run.train.get("loss")
    if not len(x):
        return None
    curve = downsample(x, y, _BUCKETS)
    series = [
        *(
            Series("first attempt", *_points(downsample(*part["loss"], _BUCKETS // 4)), look="faint")
            for part in _undone(run, "loss")
        ),
        *_line("training", curve, (x, y), 0),
    ]
    ex, ey = run.evals.get("loss")
    if len(ex):
        evaluated = downsample(ex, ey, _BUCKETS)
        series.append(Series("evaluation", evaluated.x, evaluated.y, 1, look="points"))
    undone = (
        f" {run.train.undone:,} logged steps were repeated after a restart or rollback (first attempt dotted)."
        if run.train.undone
        else ""
    )
    return Chart(
        "loss", "Learning", "Loss", ".4~f", can_log=True, series=series, note=downsampling_note([curve]) + undone,
        latest=formatting.loss(float(y[-1])), axis="loss", can_smooth=True,
        about="Mean per supervised token over all ranks and over the steps between two log lines "
        "(train.logging_steps).",
        broken=_broken([("training loss", curve)]),
    )  # fmt: skip


def _line(name: str, curve: Curve, whole: tuple[Numbers, Numbers], color: int) -> list[Series]:
    """The curve; where it was downsampled, a band between its extremes with the mean of each interval over it."""
    if not curve.is_downsampled:
        return [Series(name, curve.x, curve.y, color)]
    x, mean = means(whole[0], {"mean": whole[1]}, _BUCKETS // 2)
    return [
        Series(f"{name}, lowest and highest", curve.x, curve.y, color, look="band"),
        Series(f"{name}, mean", x, mean["mean"], color),
    ]


def _undone(run: RunHistory, name: str) -> list[dict[str, tuple[Numbers, Numbers]]]:
    return [part for part in run.train.undone_parts[-20:] if name in part and len(part[name][0])]


# A run without a plan is of a plain Trainer with our profiler; how it averages its loss is not known.
_OF_A_SCRIPT = "eval_loss, as the script's own Trainer computed it."


def _eval(run: RunHistory) -> Chart | None:
    x, y = run.evals.get("loss")
    if not len(x):
        return None
    curve = downsample(x, y, _BUCKETS)
    finite = np.isfinite(y)
    stars = []
    if finite.any():
        best = int(np.where(finite, y, np.inf).argmin())
        stars.append((float(x[best]), float(f"{y[best]:.6g}"), "lowest"))
    return Chart(
        "eval", "Learning", "Evaluation loss", ".4~f", can_log=True, note=downsampling_note([curve]), stars=stars,
        latest=formatting.loss(float(y[-1])), series=[Series("evaluation", curve.x, curve.y, 1, look="points")],
        about="Mean over the supervised tokens of the validation set." if run.facts.plan else _OF_A_SCRIPT, axis="loss",
        broken=_broken([("evaluation loss", curve)]),
    )  # fmt: skip


_PREDICTIONS = {  # title, format, axis, about
    "token_accuracy": ("Token accuracy", ".1%", "share", "Supervised tokens whose likeliest prediction was right."),
    "entropy": ("Entropy of predictions", ".3~f", "nats", "Mean over the predictions of supervised tokens."),
}


def _predictions(run: RunHistory, name: str) -> Chart | None:
    x, y = run.train.get(name)
    if not len(x):
        return None
    title, shown, axis, about = _PREDICTIONS[name]
    curve = downsample(x, y, _BUCKETS)
    series = _line("training", curve, (x, y), 0)
    ex, ey = run.evals.get(name)
    if len(ex):
        evaluated = downsample(ex, ey, _BUCKETS)
        series.append(Series("evaluation", evaluated.x, evaluated.y, 1, look="points"))
    return Chart(
        name, "Learning", title, shown, note=downsampling_note([curve]), series=series, axis=axis, about=about,
        latest=formatting.percent(float(y[-1])) if axis == "share" else f"{y[-1]:.3f}", can_smooth=True,
    )  # fmt: skip


def _one_curve(chart: Chart, name: str, points: tuple[Numbers, Numbers], color: int, look: str = "line") -> Chart:
    """The chart with its only curve, which is drawn as `look` unless it has to be downsampled."""
    curve = downsample(*points, _BUCKETS)
    series = [replace(one, look=look) if one.look == "line" else one for one in _line(name, curve, points, color)]
    return replace(chart, note=downsampling_note([curve]), series=series, broken=_broken([(name, curve)]))


def _grad_norm(run: RunHistory) -> Chart | None:
    x, y = run.train.get("grad_norm")
    if not len(x):
        return None
    chart = Chart(
        "grad_norm", "Learning", "Gradient norm", ".4~g", can_log=True, latest=f"{y[-1]:.3g}", axis="L2 norm",
        about="Of all trained parameters, before clipping.", can_smooth=True,
    )  # fmt: skip
    return _one_curve(chart, "gradient norm", (x, y), 2)


def _learning_rate(run: RunHistory) -> Chart | None:
    x, y = run.train.get("learning_rate")
    if not len(x):
        return None
    curve = downsample(x, y, _BUCKETS)
    return Chart(
        "learning_rate", "Learning", "Learning rate", ".3~e", note=downsampling_note([curve]), from_zero=True,
        latest=f"{y[-1]:.2e}" if y[-1] else "0", series=[Series("learning rate", curve.x, curve.y, 4)],
        axis="learning rate",
    )  # fmt: skip


def _throughput(run: RunHistory) -> Chart | None:
    x, y = run.train.get("tokens_per_second")
    if not len(x):
        return None
    chart = Chart(
        "throughput", "Speed", "Tokens per second, all ranks", ".3s", " tok/s", from_zero=True,
        about="Real tokens (no padding) over wall time between two log lines, without evaluation and saving.",
        axis="tok/s, all ranks", can_smooth=True, latest=formatting.short(float(y[-1])),
    )  # fmt: skip
    return _one_curve(chart, "all ranks", (x, y), 0)


def _metrics(run: RunHistory) -> list[Chart]:
    """A chart for each name that a script logged."""
    metrics = run.metrics.all()
    return [
        _one_curve(
            replace(metric_chart(id_, metric), latest=formatting.value(metric.last[1])),
            formatting.plain(metric.name, 120), (metric.x, metric.y), 0, metric_look(metric, run.last_step),
        )
        for id_, metric in zip(metric_ids([metric.name for metric in metrics]), metrics, strict=True)
    ]  # fmt: skip


def metric_chart(id_: str, metric: Metric) -> Chart:
    """Without its curve. What a metric means is the script's business: no unit, no zero, no best."""
    positive = metric.lowest is not None and metric.lowest[1] > 0
    name = formatting.plain(metric.name, 120)
    return Chart(
        id_, "Metrics", name, ".4~g", can_log=positive, can_smooth=True, axis=name.rpartition("/")[2][:30] or "value",
        about=f"As rank {metric.rank} logged it.",
    )  # fmt: skip


def metric_look(metric: Metric, steps: int) -> str:
    """Few values far apart, such as one for each epoch, are drawn as points."""
    return "points" if len(metric.x) <= min(_MOST_RARE, steps / 2) else "line"


def metric_ids(names: Sequence[str]) -> list[str]:
    """Of their charts, for HTML and for files: different ones, and the same again while names are added behind."""
    found: list[str] = []
    for name in names:
        plain = f"metric-{re.sub('[^A-Za-z0-9]+', '-', name)[:60].strip('-')}"
        same = sum(re.fullmatch(f"{re.escape(plain)}(\\.\\d+)?", id_) is not None for id_ in found)
        found.append(f"{plain}.{same + 1}" if same else plain)
    return found


def samples_chart(unit: str) -> Chart:
    """Of all ranks together, without its curve."""
    unit = formatting.plain(unit, 40)
    return Chart(
        "samples", "Speed", f"{unit[:1].upper()}{unit[1:]} per second, all ranks", ".3~s", f" {unit}/s", from_zero=True,
        about="Samples of a step over its time, summed over the ranks.",
        axis=f"{unit}/s, all ranks", can_smooth=True,
    )  # fmt: skip


def _samples(run: RunHistory) -> list[Chart | None]:
    """Samples per second as the script counts them: all ranks, and each."""
    found = run.by_rank("samples_per_second")
    if not found:
        return []
    unit = formatting.plain(run.sample_unit, 40)
    x, y = run.samples_per_second()
    summed = _one_curve(samples_chart(unit), "all ranks", (x, y), 0) if len(found) > 1 and len(x) else None
    spec = _PerRank(
        "rank_samples", "Speed", f"{unit[:1].upper()}{unit[1:]} per second, per rank", "samples_per_second", ".3~s",
        f" {unit}/s", about="Samples of one rank in a step over its time.", axis=f"{unit}/s per rank",
    )  # fmt: skip
    return [summed, _per_rank(spec, found)]


def _over_time(run: RunHistory, spec: _PerRank) -> Chart | None:
    """Samples of the machine's usage, for what the steps do not tell: a script need not have any."""
    hours = ((run.last_time or 0.0) - (run.first_time or 0.0)) / 3600
    over, length = next((unit, length) for unit, length, most in _TIME_UNITS if hours < most)
    began = run.first_time or 0.0
    sampled = {rank: columns.get(spec.column) for rank, columns in sorted(run.usage.items())}
    sampled = {rank: ((x - began) / length, y) for rank, (x, y) in sampled.items() if len(x)}
    if len(sampled) > _MOST_RANKS:  # they sample at times of their own
        grid = next(iter(sampled.values()))[0]
        sampled = {rank: (grid, np.interp(grid, x, y)) for rank, (x, y) in sampled.items()}
    if not any(len(x) > 1 for x, _ in sampled.values()):
        return None  # the one sample of a run of a few seconds is no curve
    chart = _per_rank(spec, sampled)
    assert chart is not None
    starts = [(at - began) / length for event in run.facts.starts[1:] if (at := number(event.get("time"))) is not None]
    series = [_with_gaps(one, starts) for one in chart.series]
    return replace(chart, over=over, series=series, can_smooth=False)


def _with_gaps(series: Series, starts: Sequence[float]) -> Series:
    """Not joined across a restart: nothing was running."""
    x, y = list(series.x), list(series.y)
    for start in starts:
        at = bisect_left(x, start)
        if 0 < at < len(x):
            x.insert(at, start)
            y.insert(at, None)
    return replace(series, x=x, y=y)


def _per_rank(spec: _PerRank, found: dict[int, tuple[Numbers, Numbers]]) -> Chart | None:
    if not found:
        return None
    scale, suffix = _unit(spec, max(float(y.max()) for _, y in found.values()))
    with np.errstate(over="ignore"):  # of a damaged value: it becomes infinite, and is not drawn
        found = {rank: (x, y * scale) for rank, (x, y) in found.items()}
    if len(found) > _MOST_RANKS:
        series, curves = _spread(found)
        note = f"{len(found)} ranks: minimum, median and maximum at each step. {downsampling_note(curves)}".strip()
        broken: list[tuple[float, str]] = []
    else:
        buckets = min(_BUCKETS, _SHARED_BUCKETS // len(found))
        drawn = {rank: downsample(x, y, buckets) for rank, (x, y) in found.items()}
        series = [Series(f"rank {rank}", c.x, c.y, i, rank=rank) for i, (rank, c) in enumerate(drawn.items())]
        note, broken = (
            downsampling_note(list(drawn.values())),
            _broken([(f"rank {rank}", curve) for rank, curve in drawn.items()]),
        )
    return Chart(
        spec.id, spec.group, spec.title, spec.format, suffix, spec.about, note, axis=spec.axis,
        can_smooth=spec.group == "Speed", from_zero=spec.from_zero, series=series, broken=broken,
    )  # fmt: skip


def _unit(spec: _PerRank, most: float) -> tuple[float, str]:
    """One unit for a whole chart: a toy on a CPU has GFLOP/s, not 0.002 TFLOP/s."""
    if spec.column != "tflops" or not 0 < most < 1:
        return spec.scale, spec.suffix
    return (1e3, " GFLOP/s") if most >= 1e-3 else (1e6, " MFLOP/s")


def _spread(found: dict[int, tuple[Numbers, Numbers]]) -> tuple[list[Series], list[Curve]]:
    """Lowest, median and highest of all ranks, at the steps that all of them have."""
    steps, rows = together(found)
    if not len(steps):
        return [], []
    lines = {"lowest": rows.min(axis=0), "median": np.median(rows, axis=0), "highest": rows.max(axis=0)}
    curves = {name: downsample(steps, values, _BUCKETS) for name, values in lines.items()}
    colors = {"lowest": 2, "median": 0, "highest": 1}
    series = [
        Series(name, curve.x, curve.y, colors[name], look="line" if name == "median" else "band")
        for name, curve in curves.items()
    ]
    return series, list(curves.values())


def _phases(run: RunHistory) -> Chart | None:
    """Means over all ranks and intervals; the rest of a step is `other`."""
    timed = {
        rank: columns for rank, columns in sorted(run.profile.items())
        if not {f"seconds.{phase}" for phase in _PHASES}.isdisjoint(columns.names)
    }  # fmt: skip
    if not timed:
        return None
    steps, total = together({rank: columns.get("seconds.step") for rank, columns in timed.items()})
    if not len(steps):
        return None
    parts = {}
    for phase in _PHASES:
        if any(f"seconds.{phase}" in columns.names for columns in timed.values()):
            parts[phase] = np.mean([_filled(columns, f"seconds.{phase}", steps) for columns in timed.values()], axis=0)
    other = total.mean(axis=0) - sum(parts.values())
    parts["other"] = np.maximum(other, 0.0)
    x, stacked = means(steps, parts, _STACKED_BUCKETS)
    per_point = f" Each point is the mean of about {len(steps) / len(x):,.0f} steps." if len(x) < len(steps) else ""
    over = f", mean of {len(timed)} ranks" if len(timed) > 1 else ""
    return Chart(
        "phases", "Speed", "Step time by phase", ".3~g", " s", stacked=True, from_zero=True, axis="seconds per step",
        about=f"{', '.join(_PHASES[phase] for phase in _PHASES if phase in parts).capitalize()}; other is the rest of "
        f"the step{over}.",
        note=per_point.strip(), series=[Series(name, x, y, i) for i, (name, y) in enumerate(stacked.items())],
    )  # fmt: skip


def _filled(columns: Columns, name: str, steps: Numbers) -> Numbers:
    """A phase that a step does not report counts as 0, and its time as `other`."""
    x, y = columns.get(name)
    filled = np.zeros(len(steps))
    if len(x):
        at = np.clip(np.searchsorted(x, steps), 0, len(x) - 1)
        there = (x[at] == steps) & np.isfinite(y[at]) & (y[at] != ABSENT)
        filled[there] = y[at][there]
    return filled


def _broken(curves: Sequence[tuple[str, Curve]]) -> list[tuple[float, str]]:
    return [(x, f"{name} is {word} at step {x:,}") for name, curve in curves for x, word in curve.broken]


def _points(curve: Curve) -> tuple[list[float], list[float | None]]:
    return curve.x, curve.y
