"""How much memory may processes still take here, and has the kernel killed one for it? The cgroup is asked, too."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = ("memory.events", "memory.oom_control")  # of version 2 and version 1
# Limit, use, and of the use what the kernel takes back first (page cache nobody has touched for a while).
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_CGROUPS, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_memory(cgroups: Path = _CGROUPS, mine: Path = _MINE, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes this process may still take without pushing others out: the least of what the machine has and of what its
    cgroup and those above allow. None where the system does not say."""
    found = []
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    for folder in _folders(cgroups, mine):
        above = [parent for parent in folder.parents if parent.is_relative_to(cgroups)]
        found += [free for one in (folder, *above) if (free := _free_of(one)) is not None]
    return max(0, min(found)) if found else None


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


def oom_kills(cgroups: Path = _CGROUPS, mine: Path = _MINE) -> int | None:
    """Kills for memory in the cgroup of this process so far; None where nobody counts them."""
    for folder in _folders(cgroups, mine):
        for name in _COUNTERS:
            try:
                text = (folder / name).read_text(encoding="ascii")
            except OSError:
                continue
            counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _folders(cgroups: Path, mine: Path) -> list[Path]:
    """Where this process's cgroup may lie: by its own name, or at the root, as a container sees it; version 2 first."""
    found: list[Path] = []
    try:
        lines = [line.split(":", 2) for line in mine.read_text(encoding="ascii").splitlines()]
    except OSError:
        lines = []
    for number, controllers, path in lines:
        if number == "0":
            found += [cgroups / path.lstrip("/"), cgroups / "unified" / path.lstrip("/"), cgroups]
        elif "memory" in controllers.split(","):
            found += [cgroups / "memory" / path.lstrip("/"), cgroups / "memory"]
    return found
