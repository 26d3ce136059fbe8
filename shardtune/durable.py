"""Is it on the disk, and is it what it should be? Files that others trust, written whole, and read only if plain."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def fsync(path: Path) -> None:
    """Returns when the disk has the file's content, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Returns when the disk has all of a folder that libraries wrote, every file readable by everybody."""
    for entry in folder.rglob("*"):
        if entry.is_file():
            entry.chmod(0o644)  # safetensors 0.8 writes 0600: other users of a shared volume could not read it
        fsync(entry)
    fsync(folder)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that anybody who may enter its folder may read, and wait until the disk has it. Follows no link."""
    rest = memoryview(content.encode("utf-8") if isinstance(content, str) else content)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: str) -> None:
    """Give `path` new content such that a reader, or a crash at any line, sees the old or the new, never a part."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_file(beside, content)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_output(path: Path, content: str) -> None:
    """Write a file whose name a user gave: whole, as `replace_file`, where it is new or a plain file.

    A link stays, and what it leads to is replaced; a device or pipe (/dev/stdout) is written to.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.write(content)
    else:
        replace_file(path.resolve(), content)


@contextmanager
def library_os_errors(path: Path) -> Iterator[None]:
    """Raise a full disk as the OSError it is: libraries in Rust (safetensors, tokenizers) have errors of their own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number.group(1)), os.strerror(int(number.group(1))), str(path)) from error


class NotPlainError(OSError):
    """A folder, link, fifo, socket or device where a file should be."""


def open_plain(path: Path) -> FileIO:
    """A file opened for reading; anything else is refused unopened, because opening a fifo or a tape waits or acts.

    Raises:
        NotPlainError: it is no plain file.
        OSError: it is missing, or cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise NotPlainError(path)
    # What replaced it since then is neither followed nor waited for.
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotPlainError(path)
    return file


def read_plain(path: Path) -> bytes:
    """All of a file, as `open_plain` opens it."""
    with open_plain(path) as file:
        return file.readall()
