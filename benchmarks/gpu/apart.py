"""How is one thing measured apart from the next? In a session of its own, ended whole, before the next one begins."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK = 0.1  # seconds between two looks
_FAREWELL = 5.0  # seconds a process has to end by itself once it is asked to
MemoryInUse = Callable[[], int | None]  # bytes of the device that anybody holds; None where nobody can tell


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or None where it took too long and was ended."""

    code: int | None
    seconds: float


def run_apart(command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str]) -> Ended:
    """Run `command`, its output in `log`. All it started is gone when this returns, also when this is interrupted."""
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    return Ended(code, time.monotonic() - began)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """End the leader of a session and everything in it: asked first, then killed.

    A session and not a process group: a launcher gives each of its workers a group of its own.
    """
    if leader.poll() is None:
        leader.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(timeout=_FAREWELL)
    while left := members(leader.pid):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        time.sleep(_LOOK)


def members(session: int) -> list[int]:
    """The processes of a session that are not dead yet."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the name in parentheses: state, parent, group, session.
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session and fields[0] not in ("Z", "X"):
            found.append(int(entry.name))
    return found


def wait_for_memory(in_use: MemoryInUse, before: int | None, patience: float = 60.0) -> bool:
    """Wait until the device holds no more than `before` (and a little); False where it still does in the end."""
    if before is None:
        return True
    until = time.monotonic() + patience
    while (now := in_use()) is not None and now > before + 256 * 2**20:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK)
    return True


def nvml_memory(index: int = 0) -> MemoryInUse:
    """Reads the device by NVML: this process must not open the device itself, which would take memory of it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except ImportError:
        return nobody_tells
    except pynvml.NVMLError:
        return nobody_tells
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def nobody_tells() -> int | None:
    """Where there is no device, or no NVML: nothing is waited for."""
    return None
