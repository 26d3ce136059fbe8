"""Is it on the disk? What has to be true before a file or folder is renamed into the place others trust."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def fsync(path: Path) -> None:
    """Returns when the disk has the file's content, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
