"""What survives a crash? Checkpoints appear whole or not at all; the newest few, the best and those being read stay.

No torch here: listing and verifying checkpoints takes no GPU, and no seconds.
"""

from __future__ import annotations

import math
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.checkpoint.manifest import (
    Damage,
    Manifest,
    ManifestError,
    amend_manifest,
    read_manifest,
    verify,
    write_manifest,
)
from shardtune.durable import fsync, replace_file
from shardtune.lease import Lease, is_held

_NAME = re.compile(r"step-(\d+)")
_STAGING, _READING = ".staging-", ".reading-"
LATEST, BEST = "latest", "best"


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that cannot be trusted, and why."""

    step: int
    damages: tuple[Damage, ...]

    def __str__(self) -> str:
        return f"step-{self.step:06d}: " + "; ".join(map(str, self.damages))


class CheckpointStore:
    """The folder `checkpoints/` of a run. One process (rank 0 of the run, which holds its lease) writes.

    A save is: reserve → fill → manifest → fsync → rename → pointers → retain. What is true after a crash in each:

    - reserve: `.staging-step-N-<token>` and beside it `.staging-….owner`, locked by the writer. Nobody reads these; the
      next save removes those whose owner is dead, and leaves those of a living one.
    - fill, manifest, fsync: the same. The manifest is written last, and everything is on the disk before the rename.
    - rename: `step-N` is there, whole, or not there. Where step-N existed already (saved again after resuming from an
      older one), the pointers are turned away from it, it is renamed to a staging name, and the new one takes its
      place: a crash in between loses the old step-N, never an older checkpoint.
    - pointers: `best` and `latest` are small files with the name of a checkpoint, each replaced in one rename. After a
      crash they may name the one before; that still exists, because deleting comes later. They are files and not
      symlinks because network and object mounts often have none, and they are for people and scripts: this class reads
      the folders and their manifests, and so finds a checkpoint that was renamed but not yet pointed to.
    - retain: a checkpoint is renamed to a staging name before its files are deleted. It is there whole or not at all.

    The best is the lowest finite eval loss in the manifests; it, the last and one under a living reader's lease are
    never deleted.

    Args:
        folder: Where the checkpoints lie.
        keep: How many stay (None: all). The best one stays beyond that.
    """

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(p.name) for p in self.folder.iterdir() if p.is_dir() and not p.is_symlink())
        return sorted(int(m.group(1)) for m in matches if m)

    def not_folders(self) -> list[str]:
        """What is named like a checkpoint and is a link or a file: never read, and said where a run is looked at."""
        if not self.folder.is_dir():
            return []
        found = (path for path in sorted(self.folder.iterdir()) if _NAME.fullmatch(path.name))
        return [
            f"{path.name} is a {'symbolic link' if path.is_symlink() else 'file'} and no checkpoint: it is not used"
            for path in found
            if path.is_symlink() or not path.is_dir()
        ]

    def write(self, step: int, fill: Callable[[Path], None], about: Mapping[str, Any]) -> Path:
        """Publish one checkpoint, point to it, delete what exceeds `keep`.

        Args:
            fill: Writes the files into the folder it is given.
            about: What the manifest says beside names and checksums; `eval_loss` decides which is the best.

        Raises:
            OSError: the disk is full, or gone. Nothing is left of the attempt, and the older checkpoints stay.
        """

        def fill_all(staging: Path) -> None:
            fill(staging)
            write_manifest(staging, step, about)

        if step in self.steps():
            self._point(without=step)
        final = publish(self.path(step), fill_all)
        self._point()
        self._retain()
        return final

    def manifest(self, step: int) -> Manifest | None:
        """What the checkpoint says about itself, or None where that cannot be trusted."""
        try:
            return read_manifest(self.path(step))
        except ManifestError:
            return None

    def best(self) -> tuple[int, float] | None:
        """Step and eval loss of the best checkpoint that is there; the earlier of two equals."""
        return self._best_of(self.steps())

    def record_eval(self, step: int, loss: float) -> None:
        """The validation loss of a checkpoint that was written before it was evaluated (a stop had cut that short)."""
        amend_manifest(self.path(step), eval_loss=loss)
        self._point()

    def verify(self, step: int, *, contents: bool = True) -> list[Damage]:
        """Everything that is wrong with a checkpoint; empty if nothing is."""
        found = verify(self.path(step), contents=contents)
        manifest = self.manifest(step)
        if manifest is not None and manifest.step != step:
            found.append(Damage("manifest.json", "wrong step", f"it is of step {manifest.step}"))
        return found

    def newest_sound(self) -> tuple[int | None, list[Damaged]]:
        """The newest checkpoint of which every byte is right, and the newer ones that were passed over."""
        damaged: list[Damaged] = []
        for step in reversed(self.steps()):
            found = tuple(damage for damage in self.verify(step) if damage.spoils)
            if not found:
                return step, damaged
            damaged.append(Damaged(step, found))
        return None, damaged

    def set_aside(self, step: int, why: str = "damaged") -> Path:
        """Take a checkpoint out of the line, so that it neither counts nor is found again; kept to look at."""
        self._point(without=step)
        aside = self.folder / f"{why}-{self.path(step).name}-{secrets.token_hex(2)}"
        self.path(step).rename(aside)
        fsync(self.folder)
        return aside

    @contextmanager
    def reading(self, step: int) -> Iterator[Path]:
        """The checkpoint's folder, which is not deleted by anybody until the block is left, or this process dies.

        Raises:
            FileNotFoundError: it is not there (any more).
        """
        lease = None
        with suppress(OSError):  # a read-only mount: whoever may delete there cannot be told
            lease = Lease.take(self.folder / f"{_READING}{self.path(step).name}-{secrets.token_hex(4)}")
        try:
            if not self.path(step).is_dir():
                raise FileNotFoundError(self.path(step))
            yield self.path(step)
        finally:
            if lease is not None:
                lease.release()

    def _best_of(self, steps: list[int]) -> tuple[int, float] | None:
        known = ((manifest.eval_loss, step) for step in steps if (manifest := self.manifest(step)) is not None)
        finite = [(loss, step) for loss, step in known if loss is not None and math.isfinite(loss)]
        return min(finite)[::-1] if finite else None

    def _point(self, without: int | None = None) -> None:
        steps = [step for step in self.steps() if step != without]
        best = self._best_of(steps)
        for name, step in ((BEST, best[0] if best else None), (LATEST, steps[-1] if steps else None)):
            pointer = self.folder / name
            if step is None:
                pointer.unlink(missing_ok=True)
            elif _text(pointer) != self.path(step).name:
                replace_file(pointer, self.path(step).name + "\n")

    def _retain(self) -> None:
        steps = self.steps()
        best = self.best()
        surplus = steps[: -self.keep] if self.keep else []
        for step in surplus:
            if (best is None or step != best[0]) and not self._is_read(step):
                self._delete(step)

    def _delete(self, step: int) -> None:
        doomed = _set_doomed(self.path(step))
        if self._is_read(step):  # a reader came between the look and the rename
            doomed.rename(self.path(step))
        else:
            _delete_tree(doomed)

    def _is_read(self, step: int) -> bool:
        held = False
        for lease in self.folder.glob(f"{_READING}{self.path(step).name}-*"):
            if is_held(lease):
                held = True
            else:
                lease.unlink(missing_ok=True)  # its reader died
        return held


def publish(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder` appear with everything `fill` writes, or not at all: stage → fill → fsync → rename.

    A failure leaves nothing of the attempt (a crash does, until the next `publish` beside it).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    staging = folder.parent / f"{_STAGING}{folder.name}-{secrets.token_hex(4)}"
    lease = Lease.take(_owner_file(staging))
    assert lease is not None, "a name just drawn is nobody else's"
    try:
        staging.mkdir()
        fill(staging)
        for file in staging.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # safetensors 0.8 writes 0600: other users of a shared volume could not read it
            fsync(file)
        fsync(staging)
        doomed = _set_doomed(folder) if folder.exists() else None
        staging.rename(folder)
        fsync(folder.parent)
        if doomed is not None:
            _delete_tree(doomed)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lease.release()
    return folder


def remove_leftovers(folder: Path) -> None:
    """Delete what dead writers left in `folder`; what a living one is writing stays."""
    for left in folder.glob(f"{_STAGING}*"):
        if left.suffix == ".owner":
            if not is_held(left) and not left.with_suffix("").exists():
                left.unlink(missing_ok=True)
        elif not is_held(_owner_file(left)):
            _delete_tree(left)
            _owner_file(left).unlink(missing_ok=True)
    for left in folder.glob(".*.tmp"):  # half a pointer; only this run's one writer makes them
        left.unlink(missing_ok=True)


def _owner_file(staging: Path) -> Path:
    return staging.with_name(staging.name + ".owner")


def _set_doomed(folder: Path) -> Path:
    """Out of sight before its files go: a crash among them must not leave half of it under its name."""
    doomed = folder.parent / f"{_STAGING}old-{folder.name}-{secrets.token_hex(4)}"
    folder.rename(doomed)
    return doomed


def _delete_tree(folder: Path) -> None:
    for attempt in range(2):  # two cleaners may meet: what the other has deleted is no error
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if attempt == 0 and folder.exists():
                continue
        return


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
