"""How much of the host does this process use? Resident memory and CPU time."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

_STATM = Path("/proc/self/statm")


class HostMeter:
    """CPU percent counts all threads since the last reading: 100 is one core busy all the time."""

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._last = (time.perf_counter(), time.process_time())

    def read(self) -> dict[str, float | int]:
        now, spent = time.perf_counter(), time.process_time()
        (was, spent_before), self._last = self._last, (now, spent)
        values: dict[str, float | int] = {}
        rss = resident_bytes(self._page)
        if rss is not None:
            values["rss"] = rss
        if now > was:
            values["cpu_percent"] = round(100 * (spent - spent_before) / (now - was), 1)
        return values


def host_peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes(page: int) -> int | None:
    """None where the kernel does not report it (not Linux)."""
    try:
        return int(_STATM.read_text().split()[1]) * page
    except OSError:
        return None
