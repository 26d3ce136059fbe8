"""What do the last profiles add up to? Medians: as a line for people, numbers for trackers, a summary."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from shardtune.observe.schema import DIMENSIONS
from shardtune.terminal import operations, size

_SHORT = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "collective": "comm"}
_SHOWN_REST = 0.05  # share of a step in no phase that is shown as "other"
_KEPT = 1000  # profiles a summary is made of


class ProfileWindow:
    """The last profiles, each as it was written into the events."""

    def __init__(self, kept: int = _KEPT) -> None:
        self.profiles: deque[Mapping[str, Any]] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self.profiles)

    def add(self, profile: Mapping[str, Any]) -> None:
        self.profiles.append(profile)

    def clear(self) -> None:
        self.profiles.clear()

    def medians(self) -> dict[str, float]:
        """Of every number in the profiles, by its path: `seconds.step`, `mfu`, `gpu.power_watts`."""
        values: dict[str, list[float]] = {}
        for profile in self.profiles:
            for path, value in _numbers(profile):
                values.setdefault(path, []).append(value)
        for no_measure in ("step", "compiled"):  # a number, and what most steps do not have
            values.pop(no_measure, None)
        return {path: statistics.median(medians) for path, medians in values.items()}

    def peak(self) -> int | None:
        """The most GPU memory that was ever allocated."""
        peaks = [profile["memory"]["peak"] for profile in self.profiles if "memory" in profile]
        return max(peaks) if peaks else None


def profile_line(window: ProfileWindow, width: int | None) -> str:
    """One line, split in two where `width` columns are too few for it; None never splits it.

    Shares are the medians of each phase over the median step; "other" is the time in no phase.
    """
    medians = window.medians()
    step = medians["seconds.step"]
    known = {short: medians[path] for name, short in _SHORT.items() if (path := f"seconds.{name}") in medians}
    rest_of_step = step - sum(known.values())
    if rest_of_step > _SHOWN_REST * step and len(known) > 1:  # a script's steps have no phase but data
        known["other"] = rest_of_step
    shares = [f"{short} {seconds / step:.0%}" for short, seconds in known.items()]
    head = f"profile {window.profiles[-1]['step']}  {_seconds(step)}/step  " + " ".join(shares)
    rest = []
    if "tokens_per_second" in medians:
        rest.append(f"{medians['tokens_per_second']:,.0f} tok/s/rank")
    if "samples_per_second" in medians:
        rest.append(f"{medians['samples_per_second']:,.3g} {window.profiles[-1].get('sample_unit', 'samples')}/s/rank")
    if "tflops" in medians:
        rest.append(operations(medians["tflops"]))
    if "mfu" in medians:
        rest.append(f"MFU {medians['mfu']:.1%}")
    if "collectives.other" in medians:
        rest.append(_sent(medians))
    peak = window.peak()
    if peak is not None:
        rest.append(f"{size(peak)} peak")
    elif "host.rss" in medians:
        rest.append(f"{size(medians['host.rss'])} host")
    tail = "  ".join(rest)
    if not tail or width is None or len(head) + 2 + len(tail) <= width:
        return f"{head}  {tail}".rstrip()
    return f"{head}\n  {tail}"


def tracker_numbers(window: ProfileWindow) -> dict[str, float]:
    """Medians under names for experiment trackers: `profile/mfu`, `profile/seconds/step`."""
    return {f"profile/{path.replace('.', '/')}": value for path, value in window.medians().items()}


def summary_of(window: ProfileWindow, steps: int) -> dict[str, object]:
    """The summary of a whole run.

    Args:
        steps: Number of profiled steps; the medians are of the last of them.
    """
    summary: dict[str, object] = {"steps": steps, "medians_of_last": len(window), "medians": window.medians()}
    peak = window.peak()
    if peak is not None:
        summary["gpu_memory_peak"] = peak
    return summary


def _numbers(value: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, float]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{path}{name}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield f"{path}{name}", float(item)


def _sent(medians: Mapping[str, float]) -> str:
    sent, between_nodes = (
        sum(medians[f"{group}.{dimension}"] for dimension in DIMENSIONS)
        for group in ("collectives", "collectives_between_nodes")
    )
    return f"sent {size(sent)}" + (f", {size(between_nodes)} between nodes" if between_nodes else "")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
