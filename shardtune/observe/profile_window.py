"""What do many profiles say? Medians over the last steps: as a line for people, numbers for trackers, a summary."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from shardtune.terminal import operations, size

_SHORT = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "collective": "comm"}
_TOLD_REST = 0.05  # of a step, that no phase explains: less is not worth a word
_KEPT = 1000  # profiles a summary is made of: a long run needs no more, and holds no more


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
        return {path: statistics.median(found) for path, found in values.items()}

    def peak(self) -> int | None:
        """The most GPU memory that was ever allocated."""
        peaks = [profile["memory"]["peak"] for profile in self.profiles if "memory" in profile]
        return max(peaks) if peaks else None


def profile_line(window: ProfileWindow, width: int | None) -> str:
    """One line, broken in two where `width` columns are too few for it; None never breaks it.

    Shares are of the median step, each the median of its phase; "other" is what none of them explains.
    """
    found = window.medians()
    step = found["seconds.step"]
    known = {short: found[path] for name, short in _SHORT.items() if (path := f"seconds.{name}") in found}
    rest_of_step = step - sum(known.values())
    if rest_of_step > _TOLD_REST * step:
        known["other"] = rest_of_step
    shares = [f"{short} {seconds / step:.0%}" for short, seconds in known.items()]
    head = f"profile {window.profiles[-1]['step']}  {_seconds(step)}/step  " + " ".join(shares)
    rest = []
    if "tokens_per_second" in found:
        rest.append(f"{found['tokens_per_second']:,.0f} tok/s/rank")
    if "tflops" in found:
        rest.append(operations(found["tflops"]))
    if "mfu" in found:
        rest.append(f"MFU {found['mfu']:.1%}")
    peak = window.peak()
    if peak is not None:
        rest.append(f"{size(peak)} peak")
    elif "host.rss" in found:
        rest.append(f"{size(found['host.rss'])} host")
    tail = "  ".join(rest)
    if not tail or width is None or len(head) + 2 + len(tail) <= width:
        return f"{head}  {tail}".rstrip()
    return f"{head}\n  {tail}"


def tracker_numbers(window: ProfileWindow) -> dict[str, float]:
    """Medians under names for experiment trackers: `profile/mfu`, `profile/seconds/step`."""
    return {f"profile/{path.replace('.', '/')}": value for path, value in window.medians().items()}


def summary_of(window: ProfileWindow, steps: int) -> dict[str, object]:
    """What is left of a run when it is over.

    Args:
        steps: All that were profiled; the medians are of the last of them.
    """
    told: dict[str, object] = {"steps": steps, "medians_of_last": len(window), "medians": window.medians()}
    peak = window.peak()
    if peak is not None:
        told["gpu_memory_peak"] = peak
    return told


def _numbers(value: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, float]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{path}{name}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield f"{path}{name}", float(item)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
