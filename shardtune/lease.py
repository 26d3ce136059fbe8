"""Is whoever uses this still alive? A file that is locked while its owner lives, and free the moment it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

# Mounts without flock: then the owner is looked up by host and process, and one on another host counts as alive for
# this long after it wrote its name.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_FOREIGN_SECONDS = 3600.0


class Lease:
    """Held from `take` to `release`, or to the end of the process however it ends: the kernel drops the lock.

    On NFS a lock of a machine that vanished is dropped by the server after its own lease time (90 s by default).
    """

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self._file = path, file

    @classmethod
    def take(cls, path: Path, *, wait: float = 0.0) -> Lease | None:
        """The lease, or None if somebody alive still has it after `wait` seconds. An orphan's file is taken over."""
        until = time.monotonic() + wait
        while True:
            # No link is followed: whoever may put one there must not choose which file is emptied below.
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
            if _lock(file):
                # Its former owner may have removed the file after we opened it: then we hold a lock on nothing.
                if _is_still(path, file):
                    _sign(file)
                    return cls(path, file)
                file.close()
                continue
            file.close()
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)

    def release(self, former: bytes = b"") -> None:
        """Give it up, and remove its file; `former`: what the file said of the dead owner it was taken over from, for
        those who know from it that the owner died."""
        with suppress(OSError):  # a disk that is gone or read-only by now; without its lock the file means nothing
            if former:
                _write(self._file, former)
            else:
                self.path.unlink(missing_ok=True)
        self._file.close()


def is_held(path: Path) -> bool:
    """Whether somebody alive holds the lease (this process counts)."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+") as file:
            return not _lock(file)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's, or a link: not ours to judge


def looks_alive(path: Path) -> bool | None:
    """As `is_held`, without touching the lock: for those who only look, and often.

    Returns:
        None when its owner cannot be looked up: another host, another user, a file cut short.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        pid, started = int(said["pid"]), said["started"]
        if said["host"] != socket.gethostname() or started is None:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return bool(_start_of(pid) == started)


def owner(path: Path) -> str:
    """Who holds it, for a message: `host gpu3, process 4711`."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f"host {said['host']}, process {said['pid']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return not _named_owner_lives(file)
    return True


def _sign(file: IO[str]) -> None:
    """Who holds it. On a full disk the lock alone has to do."""
    with suppress(OSError):
        _write(file, json.dumps(_self()).encode())


def _write(file: IO[str], text: bytes) -> None:
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), text, 0)


def _is_still(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _self() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_of(os.getpid())}


def _named_owner_lives(file: IO[str]) -> bool:
    file.seek(0)
    try:
        said = json.loads(file.read())
    except ValueError:
        return False
    if not isinstance(said, dict):
        return False
    if said.get("host") != socket.gethostname():
        return time.time() - os.fstat(file.fileno()).st_mtime < _FOREIGN_SECONDS
    pid = said.get("pid")
    return (
        isinstance(pid, int)
        and pid != os.getpid()
        and _start_of(pid) is not None
        and _start_of(pid) == said.get("started")
    )


def _start_of(pid: int) -> str | None:
    """When a process began, in the kernel's clock ticks: a number given again is another process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
