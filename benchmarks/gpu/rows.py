"""What shall be reached, and was it? One row per claim about speed or memory, each measured against its references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Measurements = Mapping[str, Mapping[str, Any]]
_FIELDS = {"speed": "tokens_per_second", "peak": "peak_gib"}


@dataclass(frozen=True)
class Bar:
    """A number that our case is held against.

    Args:
        measure: `speed` shall be at least, `peak` (memory) at most.
        against: The case it is a ratio to; None = the number itself (tokens a second, GiB).
        bar: None = nothing is asked for; the ratio is told.
        stretch: What would be better still.
    """

    measure: Literal["speed", "peak"]
    against: str | None = None
    bar: float | None = None
    stretch: float | None = None


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    ours: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Verdict:
    """One bar of one row. `value` is the ratio, or the number itself; None where something was not measured."""

    row: Row
    bar: Bar
    value: float | None
    word: str


ROWS = (
    Row("dense", "Dense 7B, bf16, 4 × 4096", "dense-4k", (
        Bar("speed", "stock-dense", 1.5), Bar("speed", "stock-dense-liger", 1.5),
        Bar("speed", "unsloth-dense", 1.0, stretch=1.15),
    )),
    Row("short", "Dense 7B, bf16, short rows, packed into 4 × 4096", "dense-short", (
        Bar("speed", "stock-dense-classic", 20), Bar("speed", "stock-dense-packing", 4),
        Bar("speed", "dense-4k", stretch=0.85),
    )),
    Row("fp8", "Dense 7B, frozen weights in FP8, 4 × 4096", "dense-fp8", (
        Bar("speed", "dense-4k", 1.25, stretch=1.4),
    )),
    Row("moe8", "Mistral 4 cut to 8 layers, bf16, attention and shared experts, 4 × 4096", "moe8", (
        Bar("speed", "stock-moe8", 1.6, stretch=2.2),
    )),
    Row("moe8-experts", "Mistral 4 cut to 8 layers, bf16, routed experts too, checkpointing", "moe8-experts-ckpt", (
        Bar("speed", "stock-moe8-experts", 1.6, stretch=2.5), Bar("peak", "stock-moe8-experts", 1.0),
    )),
    Row("moe8-experts-none", "The same, nothing computed twice", "moe8-experts", (
        Bar("speed", "stock-moe8-experts"),
    )),
    Row("moe36", "Mistral 4, all 36 layers (119B), frozen weights in FP8, 4 × 4096", "moe36-fp8", (
        Bar("speed", None, 9000, stretch=12000), Bar("peak", None, 135),
    )),
    Row("moe36-experts", "Mistral 4, all 36 layers, FP8, routed experts too (rank 4)", "moe36-fp8-experts", (
        Bar("speed", None, 0, stretch=7000),
    )),
    Row("memory", "Dense 7B, 16k tokens a micro-batch, no checkpointing", "dense-4k", (
        Bar("peak", "stock-dense-16k", 0.8), Bar("speed", "stock-dense-16k"),
    )),
    Row("memory-ckpt", "Dense 7B, 16k tokens a micro-batch, checkpointing", "dense-16k-ckpt", (
        Bar("peak", "stock-dense-16k-ckpt", 0.8), Bar("speed", "stock-dense-16k-ckpt"),
    )),
)  # fmt: skip
LABELS = {
    "dense-4k": "our own full rows, bf16",
    "stock-dense": "stock TRL, 2 × 4096",
    "stock-dense-liger": "stock TRL with Liger, 2 × 4096",
    "stock-dense-classic": "the classic recipe: 1 × 1024, no packing",
    "stock-dense-packing": "stock TRL packing, SDPA, 4 × 4096",
    "stock-dense-16k": "stock TRL, 4 × 4096",
    "stock-dense-16k-ckpt": "stock TRL, 4 × 4096, checkpointing",
    "stock-moe8": "stock TRL, 4 × 4096, checkpointing",
    "stock-moe8-experts": "PEFT target_parameters, 4 × 4096, checkpointing",
    "unsloth-dense": "Unsloth, 2 × 4096",
}


def cases_of(rows: tuple[Row, ...]) -> list[str]:
    """What the rows need, each once: a row's own case, then what it is compared with."""
    wanted = (name for row in rows for name in (row.ours, *(bar.against for bar in row.bars)) if name is not None)
    return list(dict.fromkeys(wanted))


def verdicts(rows: tuple[Row, ...], measured: Measurements) -> Iterator[Verdict]:
    for row in rows:
        for bar in row.bars:
            yield _verdict(row, bar, measured)


def _verdict(row: Row, bar: Bar, measured: Measurements) -> Verdict:
    numbers = []
    for name in (row.ours, bar.against):
        if name is None:
            continue
        found = measured.get(name, {})
        if found.get(_FIELDS[bar.measure]) is None:
            told = {"speed": "speed", "peak": "memory"}[bar.measure]
            why = found.get("why") or (f"its {told} is unknown" if found else "not asked for")
            return Verdict(row, bar, None, f"not measured ({name}: {why})")
        numbers.append(float(found[_FIELDS[bar.measure]]))
    value = numbers[0] / numbers[1] if bar.against is not None else numbers[0]
    return Verdict(row, bar, value, _word(bar, value) + _unequal(row, bar, measured))


def _unequal(row: Row, bar: Bar, measured: Measurements) -> str:
    """A ratio means little where not the same adapters were trained."""
    sizes = {measured[name]["trainable"] for name in (row.ours, bar.against) if name and "trainable" in measured[name]}
    return f", but adapters differ: {' and '.join(map(str, sorted(sizes)))} parameters" if len(sizes) > 1 else ""


def _word(bar: Bar, value: float) -> str:
    if bar.stretch is not None and _meets(bar, value, bar.stretch):
        return "stretch reached"
    if bar.bar is None:
        return "told" if bar.stretch is None else "stretch missed"
    return "reached" if _meets(bar, value, bar.bar) else "MISSED"


def _meets(bar: Bar, value: float, wanted: float) -> bool:
    return value >= wanted if bar.measure == "speed" else value <= wanted
