"""Where does the finished adapter go? Into the run's folder, or, when that cannot be written, where there is room."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.checkpoint.adapter import gather_adapter, write_adapter
from shardtune.checkpoint.store import CheckpointStore, publish
from shardtune.checkpoint.wrapper import write_for_wrapper
from shardtune.durable import library_os_errors
from shardtune.errors import ShardtuneError
from shardtune.terminal import warn

if TYPE_CHECKING:
    from shardtune.train.loop import Training

FINAL = "final"
_ATTEMPTS_APART = 3.0  # seconds
_LOOK = 0.25  # seconds between two looks at the clock and the signals

Fill = Callable[[Path], None]


def write_final(training: Training) -> Path:
    """Publish the adapter as a PEFT folder and return where. A collective; rank 0 writes.

    Raises:
        ShardtuneError: on every rank, when there is no room anywhere.
    """
    context, setup, stop, watchdog = training.context, training.setup, training.stop, training.watchdog
    model, config, wrapper = setup.model, setup.config, setup.meta_model.wrapper
    tensors = gather_adapter(model, keep=context.processes.is_main)
    outcome: dict[str, str] = {}
    if context.processes.is_main:

        def fill(folder: Path) -> None:
            write_adapter(model, tensors, folder)
            if wrapper is not None:
                write_for_wrapper(model, tensors, folder, wrapper)
            with library_os_errors(folder):
                setup.tokenizer.save_pretrained(folder)

        publishing = Publishing(
            folder=context.folder,
            fallback_dir=Path(config.train.fallback_dir).expanduser() if config.train.fallback_dir else None,
            wait_seconds=60 * config.train.final_wait_minutes,
            warn=lambda text: warn(context.console, context.events, FINAL, text),
            stopped=lambda: stop.requested,
            beat=watchdog.beat,
        )
        try:
            outcome = {"path": str(publishing.publish(fill))}
        except ShardtuneError as error:  # every rank has to leave, and with the same words
            outcome = {"what": error.what, "why": error.why, "fix": _fix(training.saver.store)}
    # Rank 0 may wait for room longer than a collective, or than this phase may last on the other ranks.
    longest = 60 * (config.train.final_wait_minutes + 3 * config.parallel.checkpoint_timeout_minutes)
    until = time.monotonic() + longest
    context.processes.wait_for_all(FINAL, lambda: watchdog.beat() if time.monotonic() < until else None)
    outcome = context.processes.share_from_main(outcome)
    if "path" not in outcome:
        raise ShardtuneError(outcome["what"], why=outcome["why"], fix=outcome["fix"])
    return Path(outcome["path"])


def _fix(store: CheckpointStore) -> str:
    try:
        steps = store.steps()
    except OSError:
        steps = []
    if not steps:
        return "Make room and start the run again. It has no checkpoint (train.save_strategy, train.save_steps)."
    return (
        f"Make room and start the same command again: it goes on from {store.path(steps[-1])}. "
        "train.fallback_dir names a second place for the adapter."
    )


@dataclass(frozen=True)
class Publishing:
    """Tries the run's folder, then `fallback_dir`, then waits for room in them, then takes TMPDIR.

    Attributes:
        folder: Of the run. Never created: where a mount is lost, its empty mount point is another disk.
        warn: Tells the user.
        stopped: Was the run asked to stop? Then the wait is over.
        beat: Called while waiting: the rank gets on.
    """

    folder: Path
    fallback_dir: Path | None
    wait_seconds: float
    warn: Callable[[str], None]
    stopped: Callable[[], bool]
    beat: Callable[[], None]

    def publish(self, fill: Fill) -> Path:
        """Where everything that `fill` writes is in the end.

        Raises:
            ShardtuneError: nowhere.
        """
        where, failures = self._try(fill)
        if where is None and self.wait_seconds > 0 and not self.stopped():
            minutes = self.wait_seconds / 60
            self.warn(
                f"{FINAL}/ cannot be written: {'; '.join(failures)}. Waiting up to {minutes:g} minutes for room "
                f"(train.final_wait_minutes); the adapter is safe in memory as long as this process lives."
            )
            where, failures = self._wait(fill)
        if where is None:
            where, failures = self._last_resort(fill, failures)
        if where is None:
            raise ShardtuneError("The adapter could not be written anywhere.", why="; ".join(failures) + ".")
        if where.parent != self.folder:
            self.warn(f"{FINAL}/ could not be written ({'; '.join(failures)}). The adapter is in {where}.")
        return where

    def _try(self, fill: Fill) -> tuple[Path | None, list[str]]:
        """Where it was written, and what went wrong before that."""
        failures: list[str] = []
        places = [self.folder] + ([self.fallback_dir / self.folder.name] if self.fallback_dir else [])
        for place in places:
            try:
                if place == self.folder:
                    place.stat()  # raises where it is gone; `publish` would make it
                else:
                    place.mkdir(parents=True, exist_ok=True)
                return publish(place / FINAL, fill), failures
            except OSError as error:
                failures.append(f"{place}: {error.strerror or error}")
        return None, failures

    def _wait(self, fill: Fill) -> tuple[Path | None, list[str]]:
        until = time.monotonic() + self.wait_seconds
        while True:
            again = min(time.monotonic() + _ATTEMPTS_APART, until)
            while time.monotonic() < again and not self.stopped():
                self.beat()
                time.sleep(_LOOK)
            where, failures = self._try(fill)
            if where is not None or time.monotonic() >= until or self.stopped():
                return where, failures

    def _last_resort(self, fill: Fill, failures: list[str]) -> tuple[Path | None, list[str]]:
        try:
            place = Path(tempfile.mkdtemp(prefix=f"shardtune-{self.folder.name}-"))  # nobody else's, and private
        except OSError as error:
            return None, [*failures, f"TMPDIR: {error.strerror or error}"]
        try:
            return publish(place / FINAL, fill), failures
        except OSError as error:
            with suppress(OSError):
                place.rmdir()
            return None, [*failures, f"{place.parent}: {error.strerror or error}"]
