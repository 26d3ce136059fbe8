"""Where is a user's script, and what does it measure? Steps, metrics and checkpoints of one rank, as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import UserInputError
from shardtune.observe.events import EventLog
from shardtune.observe.profile_window import ProfileWindow

if TYPE_CHECKING:
    from shardtune.observe.step_meter import StepMeter

Batch = TypeVar("Batch")
CHECKPOINTS = "checkpoints"
_READING, _COMPUTING, _SAVING = "reading a batch of data", "computing a step", "saving a checkpoint"
_RUNNING = "running the script"
_LINE_STEPS = 100  # that a profile line is made of


class Follower(Protocol):
    """Who has to know where the script is: its process, which has a deadline and is stopped by signals."""

    def enter(self, doing: str, step: int) -> None:
        """A step, or a part of one, begins: held to the deadline of steps."""

    def leave(self, doing: str, step: int) -> None:
        """Outside of any step, after so many of them."""

    def stop_requested(self) -> bool:
        """The same answer on every rank, which all ask."""

    def share_from_main(self, value: Any) -> Any:
        """Rank 0's value on every rank, which all ask."""


class Session:
    """One script's run, in one of its ranks.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, events: EventLog, follower: Follower) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.events, self.follower = events, follower
        self.completed = 0
        self.in_step = False
        self.profiles = ProfileWindow(_LINE_STEPS)
        self._meter: StepMeter | None = None

    @property
    def step(self) -> int:
        return self.completed + self.in_step

    @property
    def meter(self) -> StepMeter:
        if self._meter is None:
            from shardtune.observe.step_meter import StepMeter

            self._meter = StepMeter(self._write_profile)
        return self._meter

    def steps(
        self, batches: Iterable[Batch], count: Callable[[Batch], int] | None, unit: str, accumulation: int
    ) -> Iterator[Batch]:
        meter, source, used = self.meter, iter(batches), 0
        try:
            while True:
                self.follower.enter(_READING, self.completed + 1)
                try:
                    batch = meter.fetch(source)
                except StopIteration:
                    break
                self.in_step = True
                if count is not None:
                    meter.add_samples(count(batch), unit)
                self.follower.enter(_COMPUTING, self.completed + 1)
                used += 1
                yield batch
                if used == accumulation:
                    self._end_step()
                    used = 0
        finally:  # also where the loop was left: the step it was left in counts
            if used:
                self._end_step()
            self.follower.leave(_RUNNING, self.step)
            meter.pause()

    def _end_step(self) -> None:
        self.completed, self.in_step = self.completed + 1, False
        self.meter.end_step(self.completed)

    def _write_profile(self, profile: dict[str, Any]) -> None:
        self.events.write("profile", **profile)
        self.profiles.add(profile)

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        self.follower.leave(doing, self.step)
        try:
            if self.in_step:
                with self.meter.aside():
                    yield
            else:
                self.meter.pause()
                yield
        finally:
            if self.in_step:
                self.follower.enter(_COMPUTING, self.completed + 1)
            else:
                self.follower.leave(_RUNNING, self.step)

    def save(self, fill: Callable[[Path], None], keep: int | None, about: dict[str, Any]) -> Path | None:
        if self.rank != 0:
            return None
        store, step, began = CheckpointStore(self.folder / CHECKPOINTS, keep), self.step, time.perf_counter()
        with self.phase(_SAVING):
            path = store.write(step, fill, {**about, "time": time.time()})
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        seconds = round(time.perf_counter() - began, 3)
        self.events.write("checkpoint", step=step, path=str(path), bytes=size, seconds=seconds, background_seconds=0.0)
        return path

    def load(self, run: Path | None) -> tuple[int, Path] | None:
        store = CheckpointStore((run or self.folder) / CHECKPOINTS, None)
        found, damaged = None, []
        if self.rank == 0:
            found, skipped = store.newest_intact()
            damaged = [str(one) for one in skipped]
        found, damaged = self.follower.share_from_main([found, damaged])
        for one in damaged if self.rank == 0 else ():
            self.events.write("warning", about="checkpoint", text=f"Damaged and skipped: {one}")
        if found is None:
            return None
        path = store.path(found)
        if not path.is_dir():
            raise UserInputError(
                f"The checkpoint of step {found} is not visible to rank {self.rank}: {path}",
                why="Rank 0 wrote it; this node has another disk there.",
                fix="Put the run's folder (train.output_dir) on a disk that all nodes share.",
            )
        self.completed = found
        self.events.write(
            "resume", step=found, path=str(path), world_size=self.world_size, random_state="left to the script",
            changes=[], damaged=damaged,
        )  # fmt: skip
        return found, path

    def close(self) -> None:
        if self._meter is not None:
            self._meter.finish()
