"""How often did torch.compile compile? A step in which it does takes seconds or minutes longer."""

from __future__ import annotations

import sys
from collections.abc import Callable

_WARMUP_STEPS = 3  # steps in which new shapes are to be expected
_MAX_REPORTS = 3


def graphs_compiled() -> int:
    """So far in this process, recompilations included. Does not import a compiler that nobody uses."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


class CompileCounter:
    """Counts graphs compiled during steps, not between them; reports recompilations after the first steps."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._before = 0
        self._steps, self._reported = 0, 0

    def begin_step(self) -> None:
        self._before = graphs_compiled()

    def end_step(self, number: int) -> int:
        made = graphs_compiled() - self._before
        self._steps += 1
        if made > 0 and self._steps > _WARMUP_STEPS and self._reported < _MAX_REPORTS:
            self._reported += 1
            last = " (not reported again)" if self._reported == _MAX_REPORTS else ""
            self._notify(
                f"step {number} was slow because layers were recompiled, usually because its batch has a new shape. "
                f"Packed batches all have one shape (train.packing: true); train.compile: false turns compilation "
                f"off{last}."
            )
        return max(0, made)
