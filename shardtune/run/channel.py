"""How are a rank and its launcher connected? Through in-memory files, so that a full disk does not matter; and a rank
does not outlive its launcher."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardtune.run.exit_codes import LOST

LAUNCHER_VARIABLE = "SHARDTUNE_LAUNCHER_PID"
CHANNEL_VARIABLE = "SHARDTUNE_CHANNEL"
_HEADER = struct.Struct("<II")  # length and checksum of what follows
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TRIES = 20  # readings of a message that is being written, a millisecond apart


@dataclass(frozen=True)
class Channel:
    """Four anonymous files, created by the launcher, inherited by one rank and written by that rank only.

    `state` is what the rank is doing, updated continually; `failure` what ended it, written once; the other two are
    what faulthandler writes when the launcher asks for stacks (`stacks.py`).
    """

    state: int
    failure: int
    main_stack: int
    all_stacks: int

    @classmethod
    def create(cls) -> Channel:
        return cls(*(_memory_file() for _ in range(4)))

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> Channel | None:
        """This process's channel; None without a launcher of ours.

        The variable names each file by descriptor and inode: child processes of a rank inherit the variable but not
        the files, and there the descriptors may be anything.
        """
        try:
            named = [(int(number), identity) for number, _, identity in _split(environ[CHANNEL_VARIABLE])]
            if len(named) == 4 and all(_identity(number) == identity for number, identity in named):
                return cls(*(number for number, _ in named))
        except (KeyError, ValueError, OSError):
            pass
        return None

    @property
    def files(self) -> tuple[int, int, int, int]:
        return self.state, self.failure, self.main_stack, self.all_stacks

    def environment(self) -> dict[str, str]:
        return {CHANNEL_VARIABLE: ",".join(f"{number}:{_identity(number)}" for number in self.files)}

    def close(self) -> None:
        for number in self.files:
            os.close(number)


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Ask the kernel to kill this rank when its launcher ends; does nothing without our launcher, or on another OS.

    The rank's watchdog looks for its launcher too, but it starts only after torch is imported, which can take minutes
    on a busy file system. Set by the rank itself rather than in a `preexec_fn`, which is unsafe beside threads.
    """
    if LAUNCHER_VARIABLE not in environ or sys.platform != "linux":
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        return  # a sandbox that forbids it: the watchdog remains
    if os.getppid() != int(environ[LAUNCHER_VARIABLE]):  # it ended before the kernel was asked
        os._exit(LOST)


def put_message(file: int, content: Mapping[str, Any]) -> None:
    """Replace the message in `file`. The length and checksum in front show a reader whether it is complete."""
    body = json.dumps(content).encode()
    rest = memoryview(_HEADER.pack(len(body), zlib.crc32(body)) + body)
    done = 0
    while done < len(rest):
        done += os.pwrite(file, rest[done:], done)


def read_message(file: int) -> dict[str, Any] | None:
    """The message in `file`; None where there is none yet, or its writer was killed in the middle of it."""
    for _ in range(_TRIES):
        size = os.fstat(file).st_size
        if size == 0:
            return None
        whole = os.pread(file, size, 0)
        if len(whole) >= _HEADER.size:
            length, checksum = _HEADER.unpack_from(whole)
            body = whole[_HEADER.size : _HEADER.size + length]
            if len(body) == length and zlib.crc32(body) == checksum:
                message: dict[str, Any] = json.loads(body)
                return message
        time.sleep(0.001)
    return None


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardtune-rank")
    with tempfile.TemporaryFile() as file:  # not Linux: on a disk, but without a name
        return os.dup(file.fileno())


def _split(text: str) -> list[tuple[str, str, str]]:
    return [entry.partition(":") for entry in text.split(",")]


def _identity(number: int) -> str:
    found = os.fstat(number)
    return f"{found.st_dev}.{found.st_ino}"
