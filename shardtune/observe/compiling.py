"""How often was code compiled? A step in which torch.compile makes a graph takes seconds or minutes longer."""

from __future__ import annotations

import sys
from collections.abc import Callable

_WARM = 3  # steps in which new shapes are to be expected
_TELLINGS = 3


def graphs_compiled() -> int:
    """So far in this process; a layer that is compiled again counts again. Does not load a compiler nobody uses."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


class CompileCount:
    """Graphs made during steps, not in what lies between them; says so when it happens after the first steps."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before = 0
        self._steps, self._told = 0, 0

    def begin_step(self) -> None:
        self._before = graphs_compiled()

    def end_step(self, number: int) -> int:
        made = graphs_compiled() - self._before
        self._steps += 1
        if made > 0 and self._steps > _WARM and self._told < _TELLINGS:
            self._told += 1
            last = " (not said again)" if self._told == _TELLINGS else ""
            self._say(
                f"step {number} compiled layers again, which made it slow: as a rule its rows have a shape no step "
                f"before had. Packed rows have one shape (train.packing); train.compile: false compiles nothing{last}."
            )
        return max(0, made)
