"""What may a check look at? The machine, through one object, so that a test can hand a check another machine."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, NamedTuple

from shardtune.observe.environment import installed_version
from shardtune.observe.gpus import describe_gpus, visible_gpus
from shardtune.parallel.interface import interface_to

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Space(NamedTuple):
    total: int
    free: int  # for this user


def _space(path: Path) -> Space:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    stats = os.statvfs(there)
    free = stats.f_bfree if os.geteuid() == 0 else stats.f_bavail  # some is kept for root
    return Space(stats.f_frsize * stats.f_blocks, stats.f_frsize * free)


def _requires(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def _folder(package: str) -> Path | None:
    """Of an installed package, without importing it."""
    found = importlib.util.find_spec(package)
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def _ipv4(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return None
        return socket.inet_ntoa(answer[20:24])


@dataclass(frozen=True)
class System:
    """The machine as checks see it.

    Attributes:
        root: Where `/proc`, `/sys`, `/dev` and `/etc` are.
        nvml: The module `pynvml`, or what stands for it; None imports it.
        version: Of an installed package, None where it is missing.
        requires: What an installed package says that it needs.
        folder: Of an installed package; nothing is imported.
        space: Of the disk that a path is, or would be, on.
        ipv4: The address of an interface.
        interface_to: The interface by which packets to a host leave; None where that is unknown.
        resolve: A host name's addresses; raises OSError.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    nvml: Any = None
    version: Callable[[str], str | None] = installed_version
    requires: Callable[[str], list[str]] = _requires
    folder: Callable[[str], Path | None] = _folder
    space: Callable[[Path], Space] = _space
    ipv4: Callable[[str], str | None] = _ipv4
    interface_to: Callable[[str], str | None] = interface_to
    resolve: Callable[[str], list[str]] = lambda host: sorted(
        {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    )
    clock: Callable[[], float] = time.time

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """A small file's text; None where it does not exist or may not be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # also a driver that has no answer
            return None

    def names(self, folder: str) -> list[str]:
        """What a folder contains; empty where there is none."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []

    def addresses(self, interface: str) -> list[str]:
        """IPv4 and IPv6, without those that only reach the same cable (fe80)."""
        rows = [row.split() for row in (self.read("proc/net/if_inet6") or "").splitlines()]
        mine = [row[0] for row in rows if row[-1] == interface and not row[0].startswith("fe80")]
        groups = [":".join(re.findall("....", digits)) for digits in mine]
        return [address for address in (self.ipv4(interface), *groups) if address]

    @cached_property
    def settings(self) -> dict[str, tuple[str, str]]:
        """Value and place of every variable: NCCL's files, and above them the environment."""
        found: dict[str, tuple[str, str]] = {}
        own = self.environ.get("NCCL_CONF_FILE") or f"{self.environ.get('HOME', '/root')}/.nccl.conf"
        for file in ("/etc/nccl.conf", own):
            for line in (self.read(file) or "").splitlines():
                name, equals, value = line.partition("=")
                if equals and not line.lstrip().startswith("#"):
                    found[name.strip()] = value.strip(), f"in {file}"
        return found | {name: (value, f"= {value}") for name, value in self.environ.items()}

    def setting(self, name: str) -> str:
        """Empty where it is not set."""
        return self.settings.get(name, ("", ""))[0].strip()

    @cached_property
    def gpus(self) -> dict[str, Any]:
        """`observe.gpus.describe_gpus`: without a driver only `no_gpu`, the reason."""
        return describe_gpus(self.nvml_module)

    @cached_property
    def nvml_module(self) -> Any:
        if self.nvml is not None:
            return self.nvml
        import pynvml

        return pynvml

    @cached_property
    def visible_gpus(self) -> list[dict[str, Any]]:
        """Those that CUDA_VISIBLE_DEVICES leaves, in its order."""
        return visible_gpus(self.gpus.get("gpus", []), self.environ)

    @property
    def rdma_devices(self) -> list[str]:
        return self.names("sys/class/infiniband")

    @cached_property
    def torch_cuda(self) -> str | None:
        """The CUDA version torch was built for, from its version file: importing torch takes seconds."""
        folder = self.folder("torch")
        try:
            text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
        except OSError:
            return None
        found = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
        return found[1] if found else None
