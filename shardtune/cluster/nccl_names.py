"""Which NCCL_* and TORCH_* variables exist? A table of several releases, for machines that have no NCCL.

In a pod `shardtune doctor` reads the library that is there; who submits a job has none, so the names of the libraries
were read before. `python -m shardtune.cluster.nccl_names WHEEL...` (of nvidia-nccl-cu13 and torch) renews the table.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from shardtune.doctor.nccl_variables import NOT_SETTINGS, instead_of, names_in

TABLE = Path(__file__).with_name("nccl_names.json")
_WHEEL = re.compile(r"(nvidia_nccl|torch)(?:_cu\d+)?-([0-9.]+)")
_LIBRARY = re.compile(r"lib(nccl|torch|torch_cpu|torch_cuda|torch_python|c10|c10_cuda)\.so[.0-9]*")
_IN_PYTHON = re.compile(rb"[\"'](TORCH_[A-Z0-9_]*[A-Z0-9])[\"']")
# What NCCL's plugins read (SHARP and UCX of HPC-X, clouds' network plugins) is in their libraries, not in NCCL's.
_PLUGINS = ("NCCL_SHARP_", "NCCL_UCX_", "NCCL_IBEXT_", "NCCL_PLUGIN_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")


@cache
def table() -> dict[str, dict[str, list[str]]]:
    """By library (`nccl`, `torch`) and name: the releases that read it."""
    stored = json.loads(TABLE.read_text(encoding="utf-8"))
    return {
        library: {**dict.fromkeys(part["in_all"], part["releases"]), **part["in_some"]}
        for library, part in stored.items()
    }


def releases(library: str) -> list[str]:
    """The releases whose names are in the table, oldest first."""
    return list(json.loads(TABLE.read_text(encoding="utf-8"))[library]["releases"])


def unknown_names(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that no release reads, each with what to do instead.

    Names that begin with neither NCCL_ nor TORCH_ are not judged, nor are those of plugins that NCCL loads.

    Example:
        >>> unknown_names(["NCCL_TIMEOUT", "NCCL_DEBUG"])
        {'NCCL_TIMEOUT': 'Unset it; set parallel.step_timeout_minutes (and load_, checkpoint_timeout_minutes).'}
    """
    known = set().union(*table().values())
    judged = (name for name in names if name.startswith(("NCCL_", "TORCH_")) and name not in NOT_SETTINGS)
    return {
        name: f"Write TORCH_{name}: this is its old name." if f"TORCH_{name}" in known else instead_of(name, known)
        for name in judged
        if name not in known and not name.startswith(_PLUGINS)
    }


def only_in(name: str) -> list[str]:
    """The releases that read it, where others in the table do not; empty where all do, or none."""
    for library, names in table().items():
        if name in names and len(names[name]) < len(releases(library)):
            return [f"{'NCCL' if library == 'nccl' else library} {release}" for release in names[name]]
    return []


def _names_in_wheel(wheel: Path) -> set[str]:
    """From the constants of its libraries, and from the texts of its Python files."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for member in archive.namelist():
            if _LIBRARY.fullmatch(Path(member).name):
                library = Path(archive.extract(member, folder))
                found |= names_in(library)
                library.unlink()
            elif member.endswith(".py"):
                found |= {name.decode() for name in _IN_PYTHON.findall(archive.read(member))}
    return found


def _as_stored(by_release: Mapping[str, set[str]]) -> dict[str, object]:
    ordered = sorted(by_release, key=lambda release: [int(part) for part in release.split(".")])
    every, common = set().union(*by_release.values()), set.intersection(*by_release.values())
    some = {name: [release for release in ordered if name in by_release[release]] for name in sorted(every - common)}
    return {"releases": ordered, "in_all": sorted(common), "in_some": some}


def renew(wheels: Iterable[Path]) -> str:
    """The table's text, from wheels of NCCL and torch.

    Raises:
        ValueError: a file that is neither.
    """
    found: dict[str, dict[str, set[str]]] = {"nccl": {}, "torch": {}}
    for wheel in wheels:
        named = _WHEEL.match(wheel.name)
        if named is None:
            raise ValueError(f"{wheel} is a wheel of neither nvidia-nccl nor torch")
        library, prefix = ("nccl", "NCCL_") if named[1] == "nvidia_nccl" else ("torch", "TORCH_")
        # torch also names NCCL_* variables, some long gone, only to print them.
        names = {name for name in _names_in_wheel(wheel) if name.startswith(prefix)}
        found[library].setdefault(named[2], set()).update(names)
    return json.dumps({library: _as_stored(names) for library, names in found.items() if names}, indent=1) + "\n"


if __name__ == "__main__":
    TABLE.write_text(renew(map(Path, sys.argv[1:])), encoding="utf-8")
