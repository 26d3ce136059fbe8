"""How does an export appear? Whole or not at all: written beside its place, verified there, renamed."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardtune import terminal
from shardtune.durable import fsync, fsync_tree
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.lease import Lease, is_held

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of renaming a folder onto something
_RESERVE = 64 << 20  # for the small files: tokenizer, config, model card


def check_out(out: Path, nbytes: int, sources: tuple[Path, ...] = (), *, default: bool = False) -> None:
    """Raise unless a folder of `nbytes` can appear at `out`.

    Args:
        sources: Folders that are read: none may be the same folder.
        default: It is where an export goes that was given no --out.

    Raises:
        UserInputError: there is something already, or it cannot be written, or the disk has too little space.
    """
    named = str(out) if default else f"--out {out}"
    for source in sources:
        if out.resolve() == source.resolve():
            raise UserInputError(f"{named} is the folder that is read.", fix="Give a folder that does not exist yet.")
    if out.name in ("", ".."):
        raise UserInputError(f"{named} is not the name of a new folder.", fix="Give it a name: --out exported")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserInputError(
            f"{named} exists already{' and is not empty' if out.is_dir() else ''}.",
            why="An export is written whole into a folder of its own; nothing is overwritten.",
            fix="Remove it, or give --out FOLDER." if default else "Give another --out, or remove it.",
        )
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserInputError(
            f"{named} cannot be written: {above} {'is read-only' if above.is_dir() else 'is not a folder'}.",
            fix="Give --out FOLDER on a disk that can be written.",
        )
    total, _, free = shutil.disk_usage(above)
    if total == 0:  # /proc, /sys
        raise UserInputError(
            f"{named} cannot be written: {above} is on a file system that holds no files of its users.",
            fix="Give --out FOLDER on a disk that can be written.",
        )
    if nbytes + _RESERVE > free:
        raise UserInputError(
            f"{named}: the export takes {terminal.size(nbytes + _RESERVE)}, and its disk has "
            f"{terminal.size(free)} free.",
            fix="Free disk space, or give --out FOLDER on another disk.",
        )


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends without an error; otherwise nothing stays.

    A process that is killed leaves a hidden folder beside `out`, which the next export to the same `out` removes.
    """
    above = [folder for folder in out.absolute().parents if not folder.exists()]
    staging = out.parent / f".exporting-{out.name}-{secrets.token_hex(4)}"
    lease = None
    try:  # from the first file on: Ctrl-C may come at any line
        _make_parents(out)
        _remove_leftovers(out)
        lease = Lease.take(_owner_file(staging))
        assert lease is not None, "a name just drawn is nobody else's"
        staging.mkdir()
        yield staging
        fsync_tree(staging)
        if out.is_dir():
            out.rmdir()  # empty; if it no longer is, somebody else has written there
        staging.rename(out)
        fsync(out.parent)
    except OSError as error:
        _discard(staging, above)
        raise _failed(out, error) from error
    except BaseException:
        _discard(staging, above)
        raise
    finally:
        if lease is not None:
            lease.release()


def _failed(out: Path, error: OSError) -> ShardtuneError:
    if error.errno in _TAKEN and os.path.lexists(out):
        return UserInputError(
            f"{out} has appeared while this was written.",
            why="Another export to the same place was faster; nothing is overwritten.",
            fix="Give another --out, or use what is there.",
        )
    of = f" ({Path(error.filename).name})" if isinstance(error.filename, str | os.PathLike) else ""
    return ShardtuneError(
        f"The export to {out} could not be finished: {error.strerror or error}{of}.",
        why="Nothing of it is left.",
        fix="Free disk space there."
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "Check the disks of the base, the adapter and --out, and export again.",
    )


def _make_parents(out: Path) -> None:
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(
            f"{out.parent} cannot be created: {error.strerror}.", fix="Give --out FOLDER on a disk that can be written."
        ) from error


def _discard(staging: Path, above: list[Path]) -> None:
    """Remove what was written, and the folders `above` it that were not there before (the deepest comes first)."""
    shutil.rmtree(staging, ignore_errors=True)
    _owner_file(staging).unlink(missing_ok=True)
    for folder in above:
        try:
            folder.rmdir()
        except FileNotFoundError:  # interrupted before it was made
            continue
        except OSError:  # somebody else has written there
            return


def _remove_leftovers(out: Path) -> None:
    for left in out.parent.glob(f".exporting-{glob.escape(out.name)}-*"):
        owner = left if left.suffix == ".owner" else _owner_file(left)
        if not is_held(owner):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _owner_file(staging: Path) -> Path:
    return staging.with_name(staging.name + ".owner")
