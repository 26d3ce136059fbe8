"""What survives a crash? Checkpoints appear whole or not at all; the newest few, the best and those being read stay.

No torch here: listing and verifying checkpoints takes no GPU, and no seconds.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from shardtune.checkpoint.manifest import (
    Damage,
    Manifest,
    ManifestError,
    amend_manifest,
    read_manifest,
    verify,
    write_manifest,
)
from shardtune.durable import fsync, fsync_tree, read_plain, replace_file
from shardtune.errors import ShardtuneError
from shardtune.lease import Lease, is_held

_NAME = re.compile(r"step-(\d+)")
_STAGING, _READING = ".staging-", ".reading-"
LATEST, BEST = "latest", "best"
_CHOSEN = "chosen.json"
BETTER_IS_DAMAGED = "a better one is damaged"


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that cannot be trusted, and why."""

    step: int
    damages: tuple[Damage, ...]

    def __str__(self) -> str:
        return f"step-{self.step:06d}: " + "; ".join(map(str, self.damages))


@dataclass(frozen=True)
class Choice:
    """A checkpoint that `shardtune best` made the best in place of the one with the lowest eval loss.

    Attributes:
        metric: What it is the best by, as `eval` events name it.
        value: Its value of that.
        why: Not the lowest eval loss, because.
    """

    step: int
    metric: str
    value: float
    why: str


class UnreadableStoreError(ShardtuneError, OSError):
    """A folder of checkpoints that is there and cannot be listed. An OSError too: a save meets it like a full disk."""

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(
            f"Cannot list the checkpoints in {folder}.",
            why=f"{error.strerror or error} (as user {os.geteuid()}).",
            fix="Check the disk and the permissions of the folder.",
        )


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
      the folders and their manifests, and so finds a checkpoint that was renamed but not yet pointed to. One that
      cannot be written (a full disk) is removed, and written with the next save.
    - retain: a checkpoint is renamed to a staging name before its files are deleted. It is there whole or not at all.

    The best is the lowest finite eval loss in the manifests, unless `choose` names another: that holds until the run
    saves again, as it was made among the checkpoints there were; then it is the lowest of the intact ones. The best,
    the last and one under a living reader's lease are never deleted.

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
        """Steps of the complete checkpoints, oldest first.

        Raises:
            UnreadableStoreError: the folder is there and cannot be listed.
        """
        return sorted(int(match.group(1)) for match, is_folder in self._entries() if is_folder)

    def not_folders(self) -> list[Path]:
        """Entries with the name of a checkpoint that are links or files. They are never read: a link may lead to
        another run's checkpoint, which is deleted or written over there."""
        return sorted(self.folder / match.string for match, is_folder in self._entries() if not is_folder)

    def _entries(self) -> list[tuple[re.Match[str], bool]]:
        """Everything that is called step-N, and whether it is a folder."""
        try:
            with os.scandir(self.folder) as entries:
                return [(match, _is_folder(entry)) for entry in entries if (match := _NAME.fullmatch(entry.name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableStoreError(self.folder, error) from error

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
            self._update_pointers(without=step)
        final = publish(self.path(step), fill_all)
        self._renew_choice()
        self._update_pointers()
        self._retain()
        self._update_pointers()  # a pointer that had no room may have some now
        return final

    def manifest(self, step: int) -> Manifest | None:
        """What the checkpoint says about itself, or None where that cannot be trusted."""
        try:
            return read_manifest(self.path(step))
        except ManifestError:
            return None

    def best(self) -> tuple[int, float] | None:
        """Step and eval loss of the best checkpoint there is: the chosen one, or the lowest loss (of two equals the
        earlier)."""
        return self._best_of(self.by_eval_loss())

    def pointed_to(self) -> int | None:
        """The step that the pointer `best` names, whether or not that is there; None if there is no pointer."""
        named = _NAME.fullmatch(_text(self.folder / BEST) or "")
        return int(named[1]) if named else None

    def _best_of(self, by_eval_loss: list[tuple[int, float]]) -> tuple[int, float] | None:
        choice = self.choice() if by_eval_loss else None
        chosen = [entry for entry in by_eval_loss if choice is not None and entry[0] == choice.step]
        return next(iter(chosen or by_eval_loss), None)

    def choice(self) -> Choice | None:
        """What `choose` recorded, if it can be read; `best` ignores one whose checkpoint is gone."""
        try:
            found = json.loads(read_plain(self.folder / _CHOSEN))
            return Choice(int(found["step"]), str(found["metric"]), float(found["value"]), str(found["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def choose(self, choice: Choice | None) -> None:
        """Make this checkpoint the best one until the run saves again; None: the one with the lowest eval loss is."""
        if choice is None:
            (self.folder / _CHOSEN).unlink(missing_ok=True)
        else:
            replace_file(self.folder / _CHOSEN, json.dumps(asdict(choice)) + "\n")
        self._update_pointers()

    def _renew_choice(self) -> None:
        """After a save: a choice ends, but no checkpoint that it passed over as damaged becomes the best again."""
        if self.choice() is None:
            return
        ranked = self.by_eval_loss()
        intact = next((one for one in ranked if not any(damage.is_fatal for damage in self.verify(one[0]))), None)
        if intact is None or intact == ranked[0]:
            (self.folder / _CHOSEN).unlink(missing_ok=True)
            return
        renewed = Choice(intact[0], "loss", intact[1], BETTER_IS_DAMAGED)
        with suppress(OSError):  # a full disk: then the earlier choice stays
            replace_file(self.folder / _CHOSEN, json.dumps(asdict(renewed)) + "\n")

    def by_eval_loss(self, without: int | None = None) -> list[tuple[int, float]]:
        """Step and eval loss of every checkpoint that was evaluated, the best first."""
        manifests = {step: self.manifest(step) for step in self.steps() if step != without}
        known = [(manifest.eval_loss, step) for step, manifest in manifests.items() if manifest is not None]
        return [(step, loss) for loss, step in sorted((loss, step) for loss, step in known if _is_number(loss))]

    def record_eval(self, step: int, loss: float) -> None:
        """The validation loss of a checkpoint that was written before it was evaluated (a stop had cut that short)."""
        amend_manifest(self.path(step), eval_loss=loss)
        self._update_pointers()

    def verify(self, step: int, *, contents: bool = True) -> list[Damage]:
        """Everything that is wrong with a checkpoint; empty if nothing is."""
        found = verify(self.path(step), contents=contents)
        manifest = self.manifest(step)
        if manifest is not None and manifest.step != step:
            found.append(Damage("manifest.json", "wrong step", f"its manifest is of step {manifest.step}"))
        return found

    def newest_intact(self) -> tuple[int | None, list[DamagedCheckpoint]]:
        """The newest intact checkpoint (every checksum matches), and the newer ones that were passed over."""
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(self.steps()):
            found = tuple(damage for damage in self.verify(step) if damage.is_fatal)
            if not found:
                return step, damaged
            damaged.append(DamagedCheckpoint(step, found))
        return None, damaged

    def set_aside(self, step: int, why: str = "damaged") -> Path:
        """Rename a checkpoint so that it is neither used nor counted again; kept for inspection."""
        self._update_pointers(without=step)
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
        with suppress(OSError):  # a read-only mount: readers there cannot take a lease
            lease = Lease.take(self.folder / f"{_READING}{self.path(step).name}-{secrets.token_hex(4)}")
        try:
            if not self.path(step).is_dir():
                raise FileNotFoundError(self.path(step))
            yield self.path(step)
        finally:
            if lease is not None:
                lease.release()

    def _update_pointers(self, without: int | None = None) -> None:
        steps = [step for step in self.steps() if step != without]
        best = self._best_of(self.by_eval_loss(without))
        for name, step in ((BEST, best[0] if best else None), (LATEST, steps[-1] if steps else None)):
            pointer = self.folder / name
            if step is None:
                pointer.unlink(missing_ok=True)
            elif _text(pointer) != self.path(step).name:
                try:
                    replace_file(pointer, self.path(step).name + "\n")
                except OSError:  # the disk filled after the rename: the checkpoint is good all the same
                    pointer.unlink(missing_ok=True)  # none is better than one to a checkpoint that may be deleted

    def _retain(self) -> None:
        steps = self.steps()
        best = self.best()
        surplus = steps[: -self.keep] if self.keep else []
        for step in surplus:
            if (best is None or step != best[0]) and not self._is_read(step):
                self._delete(step)

    def _delete(self, step: int) -> None:
        doomed = _rename_for_deletion(self.path(step))
        if self._is_read(step):  # a reader came between the look and the rename
            doomed.rename(self.path(step))
        else:
            _delete_tree(doomed)

    def _is_read(self, step: int) -> bool:
        is_read = False
        for lease in self.folder.glob(f"{_READING}{self.path(step).name}-*"):
            if is_held(lease):
                is_read = True
            else:
                lease.unlink(missing_ok=True)  # its reader died
        return is_read


def publish(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder` appear with everything `fill` writes, or not at all: stage → fill → fsync → rename.

    A failure leaves nothing of the attempt (a crash does, until the next `publish` beside it). The folder two above has
    to be there: under a mount that was lost it is not, and making it would write to another disk.
    """
    folder.parent.mkdir(exist_ok=True)
    remove_leftovers(folder.parent)
    staging = folder.parent / f"{_STAGING}{folder.name}-{secrets.token_hex(4)}"
    lease, doomed = None, None
    try:  # from the first file on: outside a run, Ctrl-C may come at any line
        lease = Lease.take(_owner_file(staging))
        assert lease is not None, "a name just drawn is nobody else's"
        staging.mkdir()
        fill(staging)
        fsync_tree(staging)
        if folder.is_symlink() or folder.is_file():  # somebody's: kept beside, neither followed nor deleted
            folder.rename(folder.with_name(f"displaced-{folder.name}-{secrets.token_hex(2)}"))
        if folder.exists():
            doomed = _rename_for_deletion(folder)
        staging.rename(folder)
        fsync(folder.parent)
        if doomed is not None:
            _delete_tree(doomed)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        _owner_file(staging).unlink(missing_ok=True)
        restore_interrupted(folder)
        raise
    finally:
        if lease is not None:
            lease.release()
    return folder


def restore_interrupted(folder: Path) -> None:
    """Put the earlier `folder` back where a crash between the two renames of `publish` left none: it is still whole."""
    if is_interrupted(folder):
        _moved_aside(folder)[0].rename(folder)
        fsync(folder.parent)


def is_interrupted(folder: Path) -> bool:
    """Whether `restore_interrupted` would put an earlier `folder` back."""
    return not folder.exists() and bool(_moved_aside(folder))


def _moved_aside(folder: Path) -> list[Path]:
    return sorted(folder.parent.glob(f"{_STAGING}old-{folder.name}-*"))


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


def _rename_for_deletion(folder: Path) -> Path:
    """Out of sight before its files go: a crash among them must not leave half of it under its name."""
    doomed = folder.parent / f"{_STAGING}old-{folder.name}-{secrets.token_hex(4)}"
    folder.rename(doomed)
    return doomed


def _delete_tree(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)
        return
    for attempt in range(2):  # two cleaners may meet: what the other has deleted is no error
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if attempt == 0 and folder.exists():
                continue
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:  # it cannot be looked at: `verify` says why
        return True


def _is_number(loss: float | None) -> TypeGuard[float]:
    return loss is not None and math.isfinite(loss)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
