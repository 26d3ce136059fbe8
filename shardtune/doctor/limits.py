"""What may this process do? Locked memory, capabilities, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardtune.doctor.finding import Finding, fail, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.terminal import size

_IPC_LOCK = 14  # its bit in a capability mask
_LITTLE_MEMLOCK = 1 << 30  # NCCL registers some hundred MB for each RDMA device
_SHM_FOR_WORKERS = 1 << 30
_SHM_PER_RANK = 64 << 20  # NCCL's buffers between GPUs without peer access; Docker's default is 64 MB for a container


def memlock(system: System) -> int | None:
    """Bytes this process may lock: None for no limit, also where CAP_IPC_LOCK lifts it."""
    found = re.search(r"^Max locked memory\s+(\S+)", system.read("proc/self/limits") or "", re.MULTILINE)
    if found is None or found[1] == "unlimited" or _may_lock(system):
        return None
    return int(found[1])


def _may_lock(system: System) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", system.read("proc/self/status") or "", re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _IPC_LOCK & 1)


def check_memlock(system: System, job: Job) -> Iterator[Finding]:
    """RDMA needs locked memory; without it NCCL falls back to TCP and says nothing."""
    limit, devices = memlock(system), system.rdma_devices
    if limit is None:
        how = "CAP_IPC_LOCK is effective" if _may_lock(system) else "no limit"
        yield ok("memlock", f"locked memory: {how}")
    elif not devices or limit >= _LITTLE_MEMLOCK:
        yield ok("memlock", f"locked memory is limited to {size(limit)}" + ("" if devices else "; there is no RDMA"))
    else:
        uid = re.search(r"^Uid:\s*(\d+)", system.read("proc/self/status") or "", re.MULTILINE)
        evidence = (
            f"this process (uid {uid[1] if uid else '?'}) may lock {size(limit)} and has no CAP_IPC_LOCK in its "
            f"CapEff, so NCCL cannot use {', '.join(devices)} and falls back to TCP"
        )
        must = system.setting("NCCL_NET").upper() == "IB" and job.uses_nccl and job.node.nnodes > 1
        yield (fail if must else warn)(
            "memlock",
            evidence,
            "Raise the memlock limit of the container runtime (ulimit -l unlimited). IPC_LOCK in a manifest has no "
            "effect for a user other than root.",
        )


def check_shm(system: System, job: Job) -> Iterator[Finding]:
    folder = system.path("dev/shm")
    workers = job.config.train.dataloader_num_workers if job.config else 0
    needed = (_SHM_FOR_WORKERS if workers else 0) + (_SHM_PER_RANK * job.nproc if job.uses_nccl else 0)
    needed = max(needed, job.needs.shm if job.needs else 0)
    if not folder.is_dir():
        if needed:
            yield warn("shm", "/dev/shm does not exist", "Mount a tmpfs at /dev/shm.")
        return
    total, free = system.space(folder)
    if free >= needed:
        yield ok("shm", f"/dev/shm has {size(total)}, {size(free)} free")
        return
    users = [f"{workers} data workers for each rank"] if workers else []
    users += ["NCCL"] if job.uses_nccl else []
    yield warn(
        "shm",
        f"/dev/shm has {size(total)}, {size(free)} free; {' and '.join(users) or 'the run'} may need {size(needed)} "
        "(when it is full, processes crash with a bus error)",
        "Give the container more: docker --shm-size, or an emptyDir with medium: Memory at /dev/shm"
        + (", or set train.dataloader_num_workers: 0." if workers else "."),
    )
