"""What is in a settings file? Only regular files of moderate size are read: a device or a pipe may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 2**20  # the longest config we know has 20 KB
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class UnsuitableFileError(ValueError):
    """Something of this name is there, but not a file of settings; the message says why ("is a device, not a file")."""


def named_path(text: str) -> Path:
    """The path that a config names; `~` of a user who does not exist is left as it is, and not found later."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def read_settings_file(path: Path) -> bytes:
    """The file's content. Links are followed: a mounted Kubernetes ConfigMap consists of them.

    Raises:
        UnsuitableFileError: it is not a regular file, or too large; said before anything is read of it.
        OSError: as `open` does.
    """
    try:
        _refuse_unsuitable(path.stat())  # before it is opened, which alone can wind a tape or fail for a socket
        # What lies there may be another thing by now: opened without waiting for the other end of a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:
        if isinstance(error, UnsuitableFileError):
            raise
        raise UnsuitableFileError("is not a file name: it holds a null character") from error
    with os.fdopen(handle, "rb") as stream:
        _refuse_unsuitable(os.fstat(handle))
        content = stream.read(MOST_BYTES + 1)  # files in /proc have no size until they are read
    if len(content) > MOST_BYTES:
        raise UnsuitableFileError(_too_large("more than"))
    return content


def _refuse_unsuitable(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnsuitableFileError(f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a file")
    if status.st_size > MOST_BYTES:
        raise UnsuitableFileError(_too_large(f"{status.st_size:,} bytes, more than"))


def _too_large(size: str) -> str:
    return f"is too large for a settings file ({size} {MOST_BYTES:,} bytes)"
