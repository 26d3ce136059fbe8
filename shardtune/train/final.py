"""Where is the final adapter written? In the run's folder or, when that cannot be written, in a fallback."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.checkpoint.adapter import gather_adapter, write_adapter
from shardtune.checkpoint.final import FINAL, FinalSource, write_source
from shardtune.checkpoint.store import CheckpointStore, publish
from shardtune.checkpoint.wrapper import write_for_wrapper
from shardtune.durable import library_os_errors
from shardtune.errors import ShardtuneError
from shardtune.terminal import warn

if TYPE_CHECKING:
    from shardtune.train.context import Training

_RETRY_SECONDS = 3.0
_POLL_SECONDS = 0.25

WriteFiles = Callable[[Path], None]


def write_final(training: Training, source: FinalSource) -> Path:
    """Publish the adapter as a PEFT folder and return where. A collective; rank 0 writes.

    Args:
        source: Which step the model's weights are of.

    Raises:
        ShardtuneError: on every rank, when it cannot be written anywhere.
    """
    context, setup, stop, watchdog = training.context, training.setup, training.stop, training.watchdog
    model, config, wrapper = setup.model, setup.config, setup.meta_model.wrapper
    tensors = gather_adapter(model, keep=context.processes.is_main)
    outcome: dict[str, str] = {}
    if context.processes.is_main:

        def write_files(folder: Path) -> None:
            write_adapter(model, tensors, folder)
            if wrapper is not None:
                write_for_wrapper(model, tensors, folder, wrapper)
            with library_os_errors(folder):
                setup.tokenizer.save_pretrained(folder)
            write_source(folder, source)

        publishing = Publishing(
            folder=context.folder,
            fallback_dir=Path(config.train.fallback_dir).expanduser() if config.train.fallback_dir else None,
            wait_seconds=60 * config.train.final_wait_minutes,
            warn=lambda text: warn(context.console, context.events, FINAL, text),
            stopped=lambda: stop.requested,
            beat=watchdog.beat,
        )
        try:
            outcome = {"path": str(publishing.publish(write_files))}
        except ShardtuneError as error:  # every rank has to stop, with the same message
            outcome = {"what": error.what, "why": error.why, "fix": _fix(training.saver.store)}
    # Rank 0 may wait for room longer than a collective, or than this phase may last on the other ranks.
    longest = 60 * (config.train.final_wait_minutes + 3 * config.parallel.checkpoint_timeout_minutes)
    until = time.monotonic() + longest
    context.processes.wait_for_all(FINAL, lambda: watchdog.beat() if time.monotonic() < until else None)
    outcome = context.processes.share_from_main(outcome)
    if "path" not in outcome:
        raise ShardtuneError(outcome["what"], why=outcome["why"], fix=outcome["fix"], code="disk-full")
    return Path(outcome["path"])


def _fix(store: CheckpointStore) -> str:
    try:
        steps = store.steps()
    except OSError:
        steps = []
    if not steps:
        return "Free disk space and start the run again. It has no checkpoint (train.save_strategy, train.save_steps)."
    return (
        f"Free disk space and start the same command again: it resumes from {store.path(steps[-1])}. "
        "train.fallback_dir sets a second location for the adapter."
    )


@dataclass(frozen=True)
class Publishing:
    """Tries the run's folder, then `fallback_dir`, then waits for space in them, then uses TMPDIR.

    Attributes:
        folder: Of the run. Never created: where a mount is lost, its empty mount point is another disk.
        warn: Prints a warning.
        stopped: Was the run asked to stop? Then waiting ends.
        beat: Called while waiting: the watchdog's heartbeat.
    """

    folder: Path
    fallback_dir: Path | None
    wait_seconds: float
    warn: Callable[[str], None]
    stopped: Callable[[], bool]
    beat: Callable[[], None]

    def publish(self, write_files: WriteFiles) -> Path:
        """Where everything that `write_files` writes was published.

        Raises:
            ShardtuneError: it could not be written anywhere.
        """
        where, failures = self._try(write_files)
        if where is None and self.wait_seconds > 0 and not self.stopped():
            minutes = self.wait_seconds / 60
            self.warn(
                f"Cannot write {FINAL}/: {'; '.join(failures)}. Waiting up to {minutes:g} minutes for disk space "
                "(train.final_wait_minutes); until then the adapter exists only in this process's memory."
            )
            where, failures = self._wait(write_files)
        if where is None:
            where, failures = self._last_resort(write_files, failures)
        if where is None:
            raise ShardtuneError("Could not write the adapter anywhere.", why="; ".join(failures) + ".")
        if where.parent != self.folder:
            self.warn(f"Could not write {FINAL}/ ({'; '.join(failures)}). The adapter is in {where}.")
        return where

    def _try(self, write_files: WriteFiles) -> tuple[Path | None, list[str]]:
        """Where it was written, and what went wrong before that."""
        failures: list[str] = []
        places = [self.folder] + ([self.fallback_dir / self.folder.name] if self.fallback_dir else [])
        for place in places:
            try:
                if place == self.folder:
                    place.stat()  # raises where it is gone; `publish` would make it
                else:
                    place.mkdir(parents=True, exist_ok=True)
                return publish(place / FINAL, write_files), failures
            except OSError as error:
                failures.append(f"{place}: {error.strerror or error}")
        return None, failures

    def _wait(self, write_files: WriteFiles) -> tuple[Path | None, list[str]]:
        until = time.monotonic() + self.wait_seconds
        while True:
            again = min(time.monotonic() + _RETRY_SECONDS, until)
            while time.monotonic() < again and not self.stopped():
                self.beat()
                time.sleep(_POLL_SECONDS)
            where, failures = self._try(write_files)
            if where is not None or time.monotonic() >= until or self.stopped():
                return where, failures

    def _last_resort(self, write_files: WriteFiles, failures: list[str]) -> tuple[Path | None, list[str]]:
        try:
            place = Path(tempfile.mkdtemp(prefix=f"shardtune-{self.folder.name}-"))  # nobody else's, and private
        except OSError as error:
            return None, [*failures, f"TMPDIR: {error.strerror or error}"]
        try:
            return publish(place / FINAL, write_files), failures
        except OSError as error:
            with suppress(OSError):
                place.rmdir()
            return None, [*failures, f"{place.parent}: {error.strerror or error}"]
