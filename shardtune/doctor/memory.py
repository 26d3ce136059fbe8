"""Do the run's processes and their host memory fit into this machine or container?"""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.doctor.finding import Finding, fail, ok, warn
from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.errors import UserInputError
from shardtune.launch.capacity import check_capacity
from shardtune.machine import free_memory, memory_limit, oom_kills, usable_cores
from shardtune.terminal import size


def check_memory(system: System, job: Job) -> Iterator[Finding]:
    """The container's limit, and what is available now, against the plan's host memory of this node."""
    cgroups, mine = system.path("sys/fs/cgroup"), system.path("proc/self/cgroup")
    limit, free = memory_limit(cgroups, mine), free_memory(cgroups, mine, system.path("proc/meminfo"))
    evidence = f"{size(limit)} for this process" + (f", {size(free)} available" if free is not None else "")
    needed = job.needs.per_node if job.needs else 0
    text = f"the ranks of this node need about {size(needed)} of host memory; {evidence}"
    fix = "Raise the memory limit of the container or pod, or use fewer processes or less offloading on this node."
    if needed > limit:
        # On a CPU the activations, an estimate, are part of it.
        yield (fail if job.device == "cuda" else warn)("host memory", text, fix)
    elif free is not None and needed > free:
        yield warn("host memory", text, "Stop what else uses memory here. " + fix)
    else:
        yield ok("host memory", evidence + (f"; about {size(needed)} are needed" if needed else ""))
    if kills := oom_kills(cgroups, mine):
        yield warn("oom kills", f"the kernel has killed {kills} processes of this cgroup for memory", fix)


def check_processes(system: System, job: Job) -> Iterator[Finding]:
    """What `train` would refuse without --force: more processes than there is memory or cores for."""
    if job.nproc == 1:
        return
    try:
        check_capacity(job.nproc, usable_cores() if job.device == "cpu" else None)
    except UserInputError as error:
        yield fail("processes", f"{error.what} {error.why}", error.fix)
