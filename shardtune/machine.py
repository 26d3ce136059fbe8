"""What may this process use of its machine? Cores and memory, as the system and the cgroup of a pod or job allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS, MY_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Limit, use, and of the use what the kernel takes back first (page cache nobody has touched for a while).
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_OOM_COUNTERS = ("memory.events", "memory.oom_control")  # of version 2 and version 1


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: a pod that is limited to 4 CPUs still sees all of its machine's."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(seen, math.ceil(int(allowed) / int(period))))
    except (OSError, ValueError):  # no such file, or `max`
        return seen


def lacks_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """A CPU without bfloat16 units: products in it are many times slower than in float32."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        return False  # not Linux: nothing to go by
    return not flags & {"avx512_bf16", "amx_bf16", "bf16"}


def free_memory(cgroups: Path = CGROUPS, mine: Path = MY_CGROUPS, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes this process may still take without pushing others out: the least of what the machine has and of what its
    cgroup and those above allow. None where the system does not say."""
    found = []
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    found += [free for one in _own_and_above(cgroups, mine) if (free := _free_of(one)) is not None]
    return max(0, min(found)) if found else None


def memory_limit(cgroups: Path = CGROUPS, mine: Path = MY_CGROUPS) -> int:
    """Bytes of memory this process may use if nobody else does: the machine's, or less where a cgroup limits it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _own_and_above(cgroups, mine):
        for name, _, _ in _LIMITS:
            with suppress(OSError, ValueError):  # the other version, or `max`
                found.append(int((folder / name).read_text(encoding="ascii")))
    return min(found)


def _own_and_above(cgroups: Path, mine: Path) -> Iterator[Path]:
    """The cgroup of this process and those that it is in: a limit of any of them counts."""
    for folder in cgroup_folders(cgroups, mine):
        yield from (one for one in (folder, *folder.parents) if one.is_relative_to(cgroups))


def _free_of(folder: Path) -> int | None:
    """What one cgroup leaves; None where it sets no limit."""
    for limit, used, reclaimable in _LIMITS:
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            allowed, taken = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, used))
            return int(allowed) - int(taken) + int(stat.get(reclaimable, 0))
        except (OSError, ValueError):  # the other version, or `max`
            continue
    return None


def oom_kills(cgroups: Path = CGROUPS, mine: Path = MY_CGROUPS) -> int | None:
    """Processes that the kernel has killed for memory in the cgroup of this process; None where nobody counts."""
    for folder in cgroup_folders(cgroups, mine):
        for name in _OOM_COUNTERS:
            try:
                text = (folder / name).read_text(encoding="ascii")
            except OSError:
                continue
            counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def cgroup_folders(cgroups: Path, mine: Path) -> list[Path]:
    """Where this process's cgroup may lie: by its own name, or at the root, as a container sees it; version 2 first."""
    found: list[Path] = []
    try:
        lines = [line.split(":", 2) for line in mine.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        lines = []
    for number, controllers, path in lines:
        if number == "0":
            found += [cgroups / path.lstrip("/"), cgroups / "unified" / path.lstrip("/"), cgroups]
        elif "memory" in controllers.split(","):
            found += [cgroups / "memory" / path.lstrip("/"), cgroups / "memory"]
    return found
