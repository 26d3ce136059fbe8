"""Are the disks fit? Free space, kinds of file systems, how fast the model is read and a checkpoint is saved."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardtune.config.schema import ModelSection
from shardtune.doctor.finding import Finding, fail, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.errors import UserInputError
from shardtune.launch.named_paths import check_inputs
from shardtune.model.locate import folder_on_disk, looks_local
from shardtune.terminal import size

_READ_SECONDS, _READ_BYTES, _READERS, _BLOCK = 1.5, 1 << 30, 4, 8 << 20
_WRITE_BYTES = 64 << 20
_LEAST_BYTES = 16 << 20  # less than that is read in no time, and tells nothing
_SAVE_MARGIN = 10.0  # seconds: the rest of a step, and the process's own end
_OUTPUT_RISKS = {
    "tmpfs": "is memory: it counts against the container's limit, and is lost when that ends",
    "ramfs": "is memory, and is lost when the container ends",
    "overlay": "is a layer of the container: it is lost when that ends",
    "cifs": "has no atomic renames",
    "smb3": "has no atomic renames",
}


def file_system(system: System, path: Path) -> tuple[str, str]:
    """Kind and mount point of the file system that a path is, or would be, on."""
    best = ("?", "")
    for line in (system.read("proc/mounts") or "").splitlines():
        _, point, kind = line.split()[:3]
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point)
        # A later line is mounted over an earlier one.
        if path.is_relative_to(point) and len(point) >= len(best[1]):
            best = (kind, point)
    return best


def check_paths(system: System, job: Job) -> Iterator[Finding]:
    """What `train` would refuse: a model or data that is not where the config says."""
    if job.config is None:
        return
    try:
        check_inputs(job.config)
    except UserInputError as error:
        yield fail("paths", " ".join(filter(None, (error.what, error.why))), error.fix)
    else:
        name = job.config.model.model_name_or_path
        if not looks_local(name) and _is_missing(job.config.model):
            yield warn(
                "paths",
                f"there is no folder '{name}', so it is taken for a Hub name; it is not in the Hub's cache",
                "Correct model.model_name_or_path, or download the model before the run starts.",
            )
        else:
            yield ok("paths", "the model and the data are where the config says")


def _is_missing(section: ModelSection) -> bool:
    try:
        folder_on_disk(section)
    except UserInputError:
        return True
    return False


def check_output(system: System, job: Job) -> Iterator[Finding]:
    """Free space for checkpoints, and a file system that keeps them."""
    if job.config is None or job.node.node_rank:  # rank 0 saves
        return
    total, free = system.space(job.output)
    needed = job.needs.disk if job.needs else 0
    kind, point = file_system(system, job.output)
    evidence = f"{job.output} has {size(free)} of {size(total)} free ({kind} at {point or '?'})"
    fix = "Free space there, set train.output_dir to another disk, or lower train.save_total_limit."
    if (obstacle := _not_writable(job.output)) is not None:
        yield fail("output.space", obstacle, "Set train.output_dir to a folder that this user can write to.")
    elif free == 0 and total:  # some network file systems count nothing
        yield fail("output.space", f"{evidence}: it is full", fix)
    elif free < needed:
        yield warn("output.space", f"{evidence}; the checkpoints need about {size(needed)}", fix)
    else:
        yield ok("output.space", evidence + (f"; about {size(needed)} are needed" if needed else ""))
    risk = _OUTPUT_RISKS.get(kind, "is FUSE: renames and syncs may not be atomic" if kind.startswith("fuse") else "")
    # Where no volumes are mounted into it, a container's own layer is what its user chose.
    if risk and (kind != "overlay" or "KUBERNETES_SERVICE_HOST" in system.environ):
        yield warn("output.file system", f"{job.output} is on {kind}, which {risk}", "Mount a volume for it.")


def _not_writable(folder: Path) -> str | None:
    """Why nothing can be written there; the folder itself may be made later."""
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    return None if os.access(nearest, os.W_OK) else f"{nearest} cannot be written to"


def check_read_speed(system: System, job: Job) -> Iterator[Finding]:
    """How long the model's files take to read here, past the page cache."""
    files = sorted(job.model.glob("*.safetensors"), key=lambda file: -file.stat().st_size) if job.model else []
    if not files or job.config is None:
        return
    total = sum(file.stat().st_size for file in files)
    if total < _LEAST_BYTES:
        return
    speed = _read_speed(files[0])
    kind, point = file_system(system, job.model or files[0])
    seconds, allowed = total / speed, 60 * job.config.parallel.load_timeout_minutes
    evidence = (
        f"{size(speed)}/s past the page cache at {job.model} ({kind} at {point or '?'}): "
        f"{size(total)} of weights take {seconds:.0f} s"
    )
    if seconds > allowed / 2:
        yield warn(
            "model.read speed", f"{evidence}; parallel.load_timeout_minutes allows {allowed:.0f} s",
            "Copy the model to a local or faster disk, or raise parallel.load_timeout_minutes.",
        )  # fmt: skip
    else:
        yield ok("model.read speed", evidence)


def _read_speed(file: Path) -> float:
    """Bytes per second of a few readers at different places of one file, for a second or so."""
    end, part = time.monotonic() + _READ_SECONDS, max(_BLOCK, file.stat().st_size // _READERS // _BLOCK * _BLOCK)
    began = time.monotonic()
    with ThreadPoolExecutor(_READERS) as pool:
        read = sum(pool.map(lambda number: _read_part(file, number * part, part, end), range(_READERS)))
    return max(read, 1) / max(time.monotonic() - began, 1e-6)


def _read_part(file: Path, start: int, part: int, end: float) -> int:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct reads
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, start, part, os.POSIX_FADV_DONTNEED)
    try:
        buffer, done = mmap.mmap(-1, _BLOCK), 0  # aligned to a page, as direct reads ask
        while done < min(part, _READ_BYTES // _READERS) and time.monotonic() < end:
            if (number := os.preadv(handle, [buffer], start + done)) == 0:
                break
            done += number
            if number % 4096:  # the end of the file
                break
        return done
    finally:
        os.close(handle)


def check_grace(system: System, job: Job) -> Iterator[Finding]:
    """Whether a save fits between SIGTERM and SIGKILL, by the speed of a small write at the output."""
    if job.needs is None or job.node.node_rank:
        return
    folder = next(path for path in (job.output, *job.output.parents) if path.exists())
    speed = _write_speed(folder)
    save = job.needs.checkpoint / speed
    evidence = (
        f"a checkpoint of {size(job.needs.checkpoint)} takes about {save:.0f} s at {size(speed)}/s (written and synced "
        f"at {folder}); SIGKILL follows {job.grace:.0f} s after SIGTERM"
    )
    if save + _SAVE_MARGIN > job.grace:
        wanted = 1.5 * save + 2 * _SAVE_MARGIN
        yield warn(
            "grace period", evidence,
            f"Set terminationGracePeriodSeconds (SLURM: KillWait) and train.grace_seconds to {wanted:.0f} or more.",
        )  # fmt: skip
    else:
        yield ok("grace period", evidence)


def _write_speed(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardtune-doctor-") as file:
        began = time.monotonic()
        for _ in range(_WRITE_BYTES >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        return _WRITE_BYTES / max(time.monotonic() - began, 1e-6)
