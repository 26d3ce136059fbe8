"""Which charts does a run have? Each with its unit, how it was counted, and how many steps a point stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shardtune.report import formatting
from shardtune.report.columns import ABSENT, Columns, Numbers
from shardtune.report.downsampling import Curve, downsample, means
from shardtune.report.history import RunHistory

_BUCKETS = 1000  # of a single curve: two points each, about one per pixel on a wide screen
_SHARED_BUCKETS = 3200  # of all ranks' curves of one chart together: keeps the file small
_STACKED_BUCKETS = 300
_MOST_RANKS = 8  # curves that can be distinguished; beyond that, lowest, median and highest
_GIB = 1 << 30


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
)  # fmt: skip
_PHASES = ("data", "forward", "backward", "optimizer", "collective")


def charts_of(run: RunHistory) -> list[Chart]:
    """Every chart the run has numbers for, in display order."""
    found = [
        _loss(run), _eval(run), _predictions(run, "token_accuracy"), _predictions(run, "entropy"), _grad_norm(run),
        _learning_rate(run), _throughput(run),
    ]  # fmt: skip
    has_mfu = any("mfu" in columns.names for columns in run.profile.values())
    for spec in _PER_RANK:
        alone = len(run.profile) == 1 and spec.id == "rank_throughput" and "tokens_per_second" in run.train.names
        if not alone and not (spec.id == "tflops" and has_mfu):
            found.append(_per_rank(run, spec))
        if spec.id == "step_seconds":
            found.append(_phases(run))
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


def _grad_norm(run: RunHistory) -> Chart | None:
    x, y = run.train.get("grad_norm")
    if not len(x):
        return None
    curve = downsample(x, y, _BUCKETS)
    return Chart(
        "grad_norm", "Learning", "Gradient norm", ".4~g", can_log=True, note=downsampling_note([curve]),
        latest=f"{y[-1]:.3g}", series=_line("gradient norm", curve, (x, y), 2),
        broken=_broken([("gradient norm", curve)]),
        about="Of all trained parameters, before clipping.", axis="L2 norm", can_smooth=True,
    )  # fmt: skip


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
    curve = downsample(x, y, _BUCKETS)
    return Chart(
        "throughput", "Speed", "Tokens per second, all ranks", ".3s", " tok/s", note=downsampling_note([curve]),
        from_zero=True, series=_line("all ranks", curve, (x, y), 0), latest=formatting.short(float(y[-1])),
        about="Real tokens (no padding) over wall time between two log lines, without evaluation and saving.",
        axis="tok/s, all ranks", can_smooth=True,
    )  # fmt: skip


def _per_rank(run: RunHistory, spec: _PerRank) -> Chart | None:
    found = {rank: columns.get(spec.column) for rank, columns in run.profile.items() if spec.column in columns.names}
    found = {rank: (x, y) for rank, (x, y) in sorted(found.items()) if len(x)}
    if not found:
        return None
    scale, suffix = _unit(spec, max(float(y.max()) for _, y in found.values()))
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
    steps, rows = _together(found)
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


def _together(found: dict[int, tuple[Numbers, Numbers]]) -> tuple[Numbers, np.ndarray]:
    steps = next(iter(found.values()))[0]
    for x, _ in found.values():
        steps = np.intersect1d(steps, x, assume_unique=True)
    return steps, np.array([y[np.searchsorted(x, steps)] for x, y in found.values()])


def _phases(run: RunHistory) -> Chart | None:
    """Means over all ranks and intervals; the rest of a step is `other`."""
    timed = {rank: columns for rank, columns in sorted(run.profile.items()) if "seconds.forward" in columns.names}
    if not timed:
        return None
    steps, total = _together({rank: columns.get("seconds.step") for rank, columns in timed.items()})
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
        about="Waiting for data, forward, backward, optimizer, waiting for other ranks (collective); other is the rest "
        f"of the step{over}.",
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
