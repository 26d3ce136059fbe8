"""Did the kernel kill a process for memory? The cgroup counts such kills."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = ("memory.events", "memory.oom_control")  # of version 2 and version 1


def oom_kills(cgroups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int | None:
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
