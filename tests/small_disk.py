"""A disk of a few hundred kilobytes for tests: a tmpfs that can be filled, freed, and made read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_FILLER = "filler"


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount one at `folder`; the test is skipped where that is not allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        while subprocess.run(["umount", "-l", str(folder)], capture_output=True).returncode == 0:
            pass  # also what was mounted over it


def fill(disk: Path) -> None:
    """To the last byte."""
    handle = os.open(disk / _FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    piece = bytes(4096)
    try:
        while piece:
            try:
                os.write(handle, piece)
            except OSError:
                piece = piece[: len(piece) // 2]
    finally:
        os.close(handle)


def free(disk: Path) -> None:
    (disk / _FILLER).unlink()


def make_read_only(disk: Path) -> None:
    """For everything that is opened from now on. (What is open for writing keeps Linux from remounting it.)"""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
