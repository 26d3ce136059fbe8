"""Where does this run write? A folder of its own under `output_dir`, made or reopened by one process at a time."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from shardtune.errors import UserInputError
from shardtune.lease import Lease, owner

FOLDER_VARIABLE = "SHARDTUNE_RUN_DIR"  # for the ranks of our launcher, which holds the lease
RECORD = "run.json"
LEASE = ".run.lease"  # held by the process that chose the folder, while the run is alive
CHECKPOINTS = "checkpoints"
SCRIPT = "script"  # the `kind` in the record of a user's script
Access = Literal["private", "group"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LEASE_SECONDS = 15.0  # for the data workers of a run that was just killed to notice and exit
_MODES = {"private": 0o700, "group": 0o750}
# What a run writes: none of it may be a link or a pipe.
_WRITTEN = re.compile(
    r"run\.json|config\.yaml|environment\.json|profile\.json|\.run\.lease|events-rank\d+\.jsonl|crash|logs|checkpoints|final|runs"
)
# What a run writes before its first step. A folder that holds anything else is never deleted.
_BEFORE_TRAINING = re.compile(r"run\.json|config\.yaml|environment\.json|\.run\.lease|events-rank\d+\.jsonl|crash")
_STEP_EVENT = re.compile(rb'"event": ?"(step|profile)"')


class ForeignFolderError(UserInputError):
    """Another user's folder."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, leased by this process until it releases the lease or ends.

    `created`: this process created it, so it may delete it again (`discard_untrained`).
    """

    path: Path
    lease: Lease
    created: bool

    def discard_untrained(self) -> bool:
        """Delete the folder of a run that was refused before it trained, so that its name is free; True if deleted.

        Only what this process created, under its lease, and only while it contains nothing but startup files: a run
        that has a `checkpoints` folder or has logged a step is never deleted.
        """
        names = {entry.name for entry in self.path.iterdir()}
        if not self.created or not all(map(_BEFORE_TRAINING.fullmatch, names)):
            return False
        if any(_STEP_EVENT.search(log.read_bytes()) for log in self.path.glob("events-rank*.jsonl")):
            return False
        shutil.rmtree(self.path)
        return True


def new_run_id() -> str:
    """Sorts by time; two runs started in the same second get different ids."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_run_id(name: str, option: str = "--run-id") -> None:
    """Raise unless it is one plain folder name."""
    if not _NAME.fullmatch(name):
        raise UserInputError(
            f"{option} '{name}' is not a valid folder name.", fix="Use letters, digits, dots, dashes and underscores."
        )


def create_run_folder(output_dir: str, run_id: str | None = None, access: Access = "private") -> RunFolder:
    """Create `<output_dir>/<run_id>` (absolute), or use it if it exists and is empty.

    Of several processes that want the same name at once, one gets it: creating the folder is exclusive, and nobody
    writes into it, or deletes it, without its lease.

    Raises:
        UserInputError: the id is not a folder name, the folder is not writable, or the run exists and is not empty.
    """
    name = run_id or new_run_id()
    check_run_id(name)
    folder = Path(output_dir).expanduser().absolute() / name
    created = False
    try:
        try:
            folder.mkdir(mode=_MODES[access], parents=True)
            created = True
        except FileExistsError:
            _refuse_foreign(folder)
        lease = _take_lease(folder, wait=0.0)
        if any(entry.name != LEASE for entry in folder.iterdir()):
            lease.release()
            raise UserInputError(
                f"The run '{name}' already exists: {folder}",
                why="Its folder is not empty, and a run never overwrites another.",
                fix="Choose another --run-id, omit it to get a new one, or delete that folder.",
            )
        _open_to(folder, access)
    except OSError as error:
        raise not_writable(folder, error) from error
    return RunFolder(folder, lease, created)


def hold_run_folder(folder: Path, access: Access = "private") -> RunFolder:
    """Lease the folder of an existing run.

    Raises:
        UserInputError: another process is training in it, or it belongs to another user.
    """
    try:
        _refuse_foreign(folder)
        lease = _take_lease(folder, wait=_LEASE_SECONDS)
        _open_to(folder, access)
    except OSError as error:
        raise not_writable(folder, error) from error
    return RunFolder(folder, lease, created=False)


def join_run_folder(folder: Path, access: Access = "private") -> None:
    """For ranks that do not hold the lease: make sure that the folder exists, also on a node with its own disk."""
    try:
        folder.mkdir(mode=_MODES[access], parents=True, exist_ok=True)
        _refuse_foreign(folder)
        _open_to(folder, access)
    except OSError as error:
        raise not_writable(folder, error) from error


def _take_lease(folder: Path, wait: float) -> Lease:
    lease = Lease.take(folder / LEASE, wait=wait)
    if lease is None:
        raise UserInputError(
            f"The run {folder.name} is in use by another process.",
            why=f"{owner(folder / LEASE).capitalize()} holds {folder / LEASE}.",
            fix="Wait for it, stop it, or start a separate run: --resume never, with another --run-id.",
        )
    return lease


def _refuse_foreign(folder: Path) -> None:
    """A folder that another user owns, or that contains links, may make a run write somewhere else."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UserInputError(
            f"The run's folder '{folder}' is a symbolic link.",
            why="A run writes and deletes files there, and would do so wherever the link points.",
            fix="Set train.output_dir to the real location (output_dir itself may be a link), or remove the link.",
        )
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if found.st_uid != os.geteuid() and found.st_uid != _uid_of_new_files(folder.parent):
        raise ForeignFolderError(
            f"The run's folder '{folder}' belongs to another user.",
            why=f"Its owner is user {found.st_uid}; this process runs as user {os.geteuid()}.",
            fix="Run as its owner, or start a new run: --resume never, or another --run-id.",
        )
    written = (entry for entry in folder.iterdir() if _WRITTEN.fullmatch(entry.name))
    odd = sorted(
        str(entry.relative_to(folder))
        for entry in (*written, *(folder / "crash").glob("*"), *(folder / "logs").glob("*"))
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir())
    )
    if odd:
        raise UserInputError(
            f"The run's folder '{folder}' contains links or pipes where a run writes: {', '.join(odd[:5])}.",
            why="A run would write to or delete their targets, or block on a pipe.",
            fix="Remove them, or replace them with the files themselves.",
        )


def _uid_of_new_files(folder: Path) -> int:
    """The owner of files that this process creates there; a network mount may map all users to one."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return os.geteuid()


def _open_to(folder: Path, access: Access) -> None:
    """Adds permissions and never removes any."""
    if access == "group":
        os.umask(os.umask(0o022) & ~0o050)  # for what this process writes from now on
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o050 != 0o050:
            folder.chmod(mode | 0o050)


def not_writable(folder: Path, error: OSError) -> UserInputError:
    """The error when the run's folder cannot be written."""
    return UserInputError(
        f"Cannot write to the run's folder '{folder}'.",
        why=f"{error.strerror} (as user {os.geteuid()}).",
        fix="Set train.output_dir to a folder you can write to, on a disk with free space.",
    )
