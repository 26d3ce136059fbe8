"""Does anything read the NCCL_* and TORCH_* variables that are set? The names in the libraries tell, not our own."""

from __future__ import annotations

import difflib
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from shardtune.doctor.finding import Finding, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.launch.safe_defaults import SAFE_DEFAULTS
from shardtune.terminal import count

_PREFIXES = ("NCCL_", "TORCH_")
# A whole constant, to its zero byte: sentences also name variables, some of them to say that they are gone.
_NAME = re.compile(rb"(?<![A-Z0-9_])(?:TORCH|NCCL)_[A-Z0-9_]*[A-Z0-9](?=\0)")
# Images state with the first two what is inside; the others are set by ourselves.
NOT_SETTINGS = ("NCCL_VERSION", "TORCH_VERSION", *SAFE_DEFAULTS)
INSTEAD = {  # what people who set these wanted
    "NCCL_TIMEOUT": "set parallel.step_timeout_minutes (and load_, checkpoint_timeout_minutes)",
    "NCCL_IB_CUDA_SUPPORT": "set NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "set NCCL_NET_GDR_LEVEL",
    "NCCL_TREE_THRESHOLD": "set NCCL_ALGO",
    "NCCL_LL_THRESHOLD": "set NCCL_PROTO",
}


def check_variables(system: System, job: Job) -> Iterator[Finding]:
    settings = {
        name: where
        for name, (_, where) in system.settings.items()
        if name.startswith(_PREFIXES) and name not in NOT_SETTINGS
    }
    if not settings:
        return
    libraries = _libraries(system)
    has_nccl = any(file.name.startswith("libnccl") for file in libraries)
    checked = [name for name in settings if has_nccl or name.startswith("TORCH_")]
    known = set().union(*map(names_in, libraries)) if checked else set()
    if unread := [name for name in checked if name not in known]:
        known |= _names_in_python(system, {name for name in unread if name.startswith("TORCH_")})
    for name in checked:
        if name not in known:
            yield warn(name, f"{name} ({settings[name]}) is read by nothing", instead_of(name, known))
    skipped = len(settings) - len(checked)
    read = [name for name in checked if name in known]
    if read:
        yield ok("variables", f"{', '.join(read)}: named in the libraries")
    if skipped:
        yield ok("variables", f"not checked against libnccl, which is not here: {count(skipped, 'NCCL_* variable')}")


def instead_of(name: str, known: set[str]) -> str:
    """What to do about a variable that is not among the known ones."""
    if name in INSTEAD:
        return f"Unset it; {INSTEAD[name]}."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return f"Did you mean {close[0]}?" if close else "Unset it."


def _libraries(system: System) -> list[Path]:
    """libnccl and its plugins, and torch's own libraries."""
    found: list[Path] = []
    for package in ("torch", "nvidia"):
        folder = system.folder(package)
        if folder is not None:
            patterns = ("lib/libtorch*.so", "lib/libc10*.so", "lib/libnccl*") if package == "torch" else ("nccl/lib/*",)
            found += [file for pattern in patterns for file in folder.glob(pattern)]
    places = [*system.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/x86_64-linux-gnu", "/usr/local/lib"]
    for place in filter(None, dict.fromkeys(places)):
        found += system.path(place).glob("libnccl*.so*")
    return [file for file in dict.fromkeys(file.resolve() for file in found) if file.is_file()]


def known_names(system: System) -> set[str]:
    """All that the libraries name."""
    return set().union(*map(names_in, _libraries(system)))


def names_in(library: Path) -> set[str]:
    """All names of such variables in a library's constants (`.rodata`, megabytes of a file of gigabytes)."""
    with library.open("rb") as file:
        if library.stat().st_size == 0:
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start, end = _constants(content)
            return {name.decode() for name in _NAME.findall(content, start, end)}


def _constants(content: mmap.mmap) -> tuple[int, int]:
    """Where `.rodata` of a 64-bit ELF file begins and ends; the whole file where it is something else."""
    try:
        if content[:5] != b"\x7fELF\x02":
            return 0, len(content)
        (table,) = struct.unpack_from("<Q", content, 40)
        entry, number, names = struct.unpack_from("<HHH", content, 58)
        headers = [struct.unpack_from("<II4Q", content, table + index * entry) for index in range(number)]
        text = headers[names][4]
        for name, _, _, _, offset, length in headers:
            begin = text + name
            if content[begin : begin + 8] == b".rodata\0":
                return offset, offset + length
    except (struct.error, IndexError):  # no such table
        pass
    return 0, len(content)


def _names_in_python(system: System, wanted: set[str]) -> set[str]:
    """Those of `wanted` that torch's Python files read; looked for last, in thousands of files."""
    folder, found = system.folder("torch"), set[str]()
    for file in folder.rglob("*.py") if folder and wanted else ():
        text = file.read_bytes()
        found |= {name for name in wanted - found if name.encode() in text}
        if found == wanted:
            break
    return found
