"""Did the kernel kill a process for memory? The cgroup counts such kills."""

from __future__ import annotations

from pathlib import Path

from shardtune.machine import CGROUPS, MY_CGROUPS, cgroup_folders

_COUNTERS = ("memory.events", "memory.oom_control")  # of version 2 and version 1


def oom_kills(cgroups: Path = CGROUPS, mine: Path = MY_CGROUPS) -> int | None:
    """Kills for memory in the cgroup of this process so far; None where nobody counts them."""
    for folder in cgroup_folders(cgroups, mine):
        for name in _COUNTERS:
            try:
                text = (folder / name).read_text(encoding="ascii")
            except OSError:
                continue
            counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None
