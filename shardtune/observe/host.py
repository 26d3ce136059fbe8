"""What host is this, and how much of it may be used? CPUs, memory, a container's limits, `/dev/shm`, disk, networks.

Read from `/proc` and `/sys` below `root`; what is not known is left out, never guessed. Sizes are bytes.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path("/")
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "cni", "flannel", "dummy", "tunl", "sit", "kube", "cali")


def describe_host(root: Path = _ROOT, folder: Path | None = None) -> dict[str, Any]:
    """The machine as facts.

    Args:
        root: Where `/proc`, `/sys` and `/dev/shm` are found; another one in tests.
        folder: Where runs are written; the disk it is on is described. It need not exist yet.
    """
    facts: dict[str, Any] = {"host": socket.gethostname(), "platform": platform.platform(), "cpu": _cpu(root)}
    facts["memory"] = _memory(root)
    if (shm := root / "dev/shm").is_dir():
        facts["shm"] = _space(shm)
    if folder is not None:
        facts["disk"] = _space(folder)
    facts["network"] = _interfaces(root)
    facts["rdma"] = _rdma(root)
    return {name: value for name, value in facts.items() if value}


def _cpu(root: Path) -> dict[str, Any]:
    text = _read(root / "proc/cpuinfo") or ""
    found: dict[str, Any] = {}
    if model := re.search(r"^(?:model name|Processor|cpu)\s*:\s*(.+)$", text, re.MULTILINE):
        found["model"] = model[1].strip()
    if sockets := len(set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))):
        found["sockets"] = sockets
    if threads := len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or os.cpu_count():
        found["threads"] = threads
    # Two hardware threads of a core are one core of a socket.
    pairs = set(re.findall(r"^physical id\s*:\s*(\d+)(?:\n.+)*?\ncore id\s*:\s*(\d+)", text, re.MULTILINE))
    if pairs:
        found["cores"] = len(pairs)
    if root == _ROOT and hasattr(os, "sched_getaffinity"):
        found["usable"] = len(os.sched_getaffinity(0))
    if (limit := _cpu_limit(root)) is not None and limit < found.get("threads", limit + 1):
        found["limit"] = limit
    return found


def _memory(root: Path) -> dict[str, int]:
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.MULTILINE))
    found = {
        name: int(meminfo[key]) * 1024
        for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))
        if key in meminfo
    }
    limits = [value for folder, name in _cgroup_files(root, "memory") if (value := _number(folder / name)) is not None]
    # "No limit" is a number near 2**63 in version 1 and `max` in version 2.
    if limits and min(limits) < found.get("total", 2**62):
        found["limit"] = min(limits)
        used = [folder / _USED[name] for folder, name in _cgroup_files(root, "memory")]
        if (value := next((n for file in used if (n := _number(file)) is not None), None)) is not None:
            found["used"] = value
    return found


_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def _cpu_limit(root: Path) -> float | None:
    """CPUs that the cgroup allows, 1.5 for one and a half."""
    allowed = []
    for folder, name in _cgroup_files(root, "cpu"):
        words = (_read(folder / name) or "").split()
        if name == "cpu.cfs_quota_us":
            words += (_read(folder / "cpu.cfs_period_us") or "").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]):  # else `max`, or -1
            allowed.append(int(words[0]) / int(words[1]))
    return round(min(allowed), 2) if allowed else None


def _cgroup_files(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """Files that may limit this process: those of its cgroup and of every one above it.

    In a container the path is often that of the host and does not exist here; the mount itself is then the cgroup.
    """
    names = {"memory": ("memory.max", "memory.limit_in_bytes"), "cpu": ("cpu.max", "cpu.cfs_quota_us")}[controller]
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = base, names[0]
        elif controller in controllers.split(","):
            top, name = base / controllers, names[1]
            if not top.is_dir():
                top = base / controller
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != top and top not in folder.parents:
                break
            if (folder / name).is_file():
                yield folder, name


def _space(path: Path) -> dict[str, Any]:
    """Of the disk a folder is on, or will be on once it is made."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    stats = os.statvfs(there)
    return {"path": str(path), "total": stats.f_frsize * stats.f_blocks, "free": stats.f_frsize * stats.f_bavail}


def _interfaces(root: Path) -> list[dict[str, Any]]:
    found = []
    for folder in _entries(root / "sys/class/net"):
        if folder.name.startswith(_VIRTUAL):
            continue
        one: dict[str, Any] = {"name": folder.name}
        if state := _read(folder / "operstate"):
            one["state"] = state
        if (speed := _number(folder / "speed")) is not None:  # -1, or an error, where the driver does not know
            one["megabits"] = speed
        if (mtu := _number(folder / "mtu")) is not None:
            one["mtu"] = mtu
        found.append(one)
    return found


def _rdma(root: Path) -> list[dict[str, Any]]:
    """One entry for each port of each RDMA device."""
    found = []
    for device in _entries(root / "sys/class/infiniband"):
        for port in _entries(device / "ports"):
            one: dict[str, Any] = {"device": device.name, "port": port.name}
            # state reads `4: ACTIVE`, rate `400 Gb/sec (4X NDR)`
            if state := _read(port / "state"):
                one["state"] = state.partition(": ")[2] or state
            if rate := _read(port / "rate"):
                one["rate"] = rate
            if layer := _read(port / "link_layer"):
                one["link_layer"] = layer
            found.append(one)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not there, not allowed, or a driver that has no answer
        return None


def _number(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text is not None and text.isdigit() else None
