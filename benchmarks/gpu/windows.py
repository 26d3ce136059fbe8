"""How fast were the steps, and how much memory did they take? Lines written while a reference trains, read afterwards.

Imports nothing of ours: it also runs beside libraries that replace parts of torch and transformers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

GIB = 2**30


class WindowLog:
    """A line at the end of every window of steps: the clock, tokens so far, and the most memory that was taken."""

    def __init__(self, file: Path, window: int) -> None:
        self.file, self.window = file, window
        self.file.write_text("")

    def step_ended(self, step: int, tokens: Any, **told: object) -> None:
        """`tokens`: so far, a number or a tensor on the device; it is read at the end of a window only."""
        import torch

        if step % self.window:
            return
        line: dict[str, object] = {"step": step, **told}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            line |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        line |= {"tokens": int(tokens), "seconds": time.perf_counter()}
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def read_windows(file: Path, warm: int) -> dict[str, object]:
    """What the lines after warm-up say; empty if there are none."""
    lines = read_lines(file)
    pairs = [(a, b) for a, b in pairwise(lines) if a["step"] >= warm]
    rates = [(b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]) for a, b in pairs]
    if not rates:
        return {}
    told: dict[str, object] = {"trainable": lines[-1]["trainable"]} if "trainable" in lines[-1] else {}
    return {**summed_up(rates, pairs[-1][1]["step"] - pairs[0][0]["step"]), **memory(lines), **told}


def summed_up(rates: Sequence[float], steps: int) -> dict[str, object]:
    """Median, slowest and fastest window, in tokens a second."""
    return {
        "tokens_per_second": round(statistics.median(rates), 1), "slowest": round(min(rates), 1),
        "fastest": round(max(rates), 1), "steps_counted": steps,
    }  # fmt: skip


def memory(readings: Iterable[dict[str, Any]]) -> dict[str, object]:
    """The most that was in tensors, and the most the allocator held, in GiB; empty without a GPU."""
    found = [reading for reading in readings if "peak" in reading]
    if not found:
        return {}
    return {f"{name}_gib": round(max(r[name] for r in found) / GIB, 2) for name in ("peak", "reserved")}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """JSON lines; the last one may be cut where the process was ended."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
