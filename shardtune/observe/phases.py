"""Where did the time of a step go? Spans between marks, added up by phase once the device has passed them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardtune.observe.clocks import Clock, Mark

Phase = Literal["data", "forward", "backward", "optimizer", "collective"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer", "collective")


@dataclass
class StepSpans:
    """The marks of one step.

    A span of "collective" lies inside another phase (`within`), or between two. It is taken out of the phase it lies
    in, so that phases never overlap and their sum is at most the step.
    """

    begin: Mark | None = None
    end: Mark | None = None
    spans: list[tuple[Phase, Mark, Mark, Phase | None]] = field(default_factory=list)
    known: set[Phase] = field(default_factory=set)  # phases that are measured, even if no time was spent in them

    def add(self, phase: Phase, begin: Mark, end: Mark, within: Phase | None = None) -> None:
        self.spans.append((phase, begin, end, within))
        self.known.add(phase)

    def seconds(self, clock: Clock) -> dict[str, float]:
        """`step`, and every phase that is known."""
        spent: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end, within in self.spans:
            seconds = clock.seconds(begin, end)
            spent[phase] += seconds
            if within is not None:
                spent[within] -= seconds
        phases: dict[str, float] = {phase: max(0.0, spent[phase]) for phase in PHASES if phase in self.known}
        return {"step": clock.seconds(self.begin, self.end)} | phases

    def recycle_marks(self, clock: Clock) -> None:
        marks = [mark for _, begin, end, _ in self.spans for mark in (begin, end)]
        clock.recycle([*marks, *(mark for mark in (self.begin, self.end) if mark is not None)])


class StepTimer:
    """Sets the marks of the current step. Hooks and callbacks say which phase is entered."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now = StepSpans()
        self.phase: Phase | None = None
        self._entered: Mark | None = None

    def enter(self, phase: Phase) -> None:
        if self.phase is not None:
            self.leave()
        self.phase, self._entered = phase, self.clock.mark()

    def leave(self) -> None:
        if self.phase is not None:
            self.now.add(self.phase, self._entered, self.clock.mark())
            self.phase = self._entered = None

    def drop(self) -> None:
        """Discard a phase that should not count."""
        if self.phase is not None:
            self.clock.recycle([self._entered])
            self.phase = self._entered = None

    def begin_if_new(self) -> None:
        """A step begins where the previous one ended; after a pause, with the first work that is done for it."""
        if self.now.begin is None:
            self.now.begin = self.clock.mark()

    @property
    def is_running(self) -> bool:
        return self.now.begin is not None

    def pause(self) -> None:
        """What follows belongs to no step: evaluating, saving."""
        if self.now.begin is not None:
            self.clock.recycle([self.now.begin])
            self.now.begin = None

    def finish(self) -> StepSpans:
        """The step that ends here; the next one begins."""
        self.leave()
        done, self.now = self.now, StepSpans()
        done.end = self.clock.mark()
        self.now.begin = self.clock.mark()
        return done
