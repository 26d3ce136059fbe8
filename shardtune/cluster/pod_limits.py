"""How are a pod's memory and CPU limits kept on this machine? By a cgroup of its own, of either version."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

_PERIOD = 100_000  # microseconds, the kernel's default
_SECONDS = 5.0  # for the last process of a killed pod to be gone


@dataclass
class Cgroups:
    """Those that were made, to be removed. `close` never fails."""

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")
    made: list[Path] = field(default_factory=list)

    def limit(self, name: str, memory: int | None, cpus: float | None) -> list[Path]:
        """The folders whose `cgroup.procs` puts a process under these limits.

        Raises:
            OSError: this process may not make any.
        """
        if memory is None and cpus is None:
            return []
        places = self._own_places()
        if (self.root / "cgroup.controllers").is_file():
            folder = self._unified(places[""], [word for word, value in (("memory", memory), ("cpu", cpus)) if value])
            folder = self._make(folder / name)
            values = {"memory.max": memory, "cpu.max": f"{int(cpus * _PERIOD)} {_PERIOD}" if cpus else None}
            _write(folder, values)
            return [folder]
        found = []
        if memory is not None:
            found.append(self._make(self.root / "memory" / places["memory"] / name))
            _write(found[-1], {"memory.limit_in_bytes": memory})
        if cpus is not None:
            found.append(self._make(self.root / "cpu" / places["cpu"] / name))
            _write(found[-1], {"cpu.cfs_quota_us": int(cpus * _PERIOD)})
        return found

    def close(self) -> None:
        deadline = time.monotonic() + _SECONDS
        for folder in self.made:
            while folder.is_dir():
                with contextlib.suppress(OSError):  # a process in it has not ended yet
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        self.made.clear()

    def _own_places(self) -> dict[str, str]:
        """This process's cgroup by controller; "" is that of version 2."""
        places: dict[str, str] = {}
        for line in self.own.read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            places |= dict.fromkeys(controllers.split(","), place.lstrip("/"))
        return places

    def _unified(self, place: str, controllers: list[str]) -> Path:
        """A cgroup below which these controllers work. The kernel refuses where it holds processes itself."""
        folder = self.root / place
        enabled = (folder / "cgroup.subtree_control").read_text(encoding="utf-8").split()
        for missing in [name for name in controllers if name not in enabled]:
            (folder / "cgroup.subtree_control").write_text(f"+{missing}", encoding="utf-8")
        return folder

    def _make(self, folder: Path) -> Path:
        folder.mkdir()
        self.made.append(folder)
        return folder


def _write(folder: Path, values: dict[str, int | str | None]) -> None:
    for name, value in values.items():
        if value is not None:
            (folder / name).write_text(str(value), encoding="utf-8")
