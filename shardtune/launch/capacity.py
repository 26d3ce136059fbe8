"""Does this machine have the memory and cores for that many processes? Checked before any of them is started."""

from __future__ import annotations

import sys

from shardtune.errors import UserInputError
from shardtune.machine import free_memory
from shardtune.run.failure import three_parts
from shardtune.terminal import fitted

LEAST_BYTES = 350 << 20  # private memory of one process after its imports; measured with torch 2.13 (CPU): 330 MB
PER_CORE = 4  # processes per core; beyond that, ranks mostly wait for a time slice


def check_capacity(nproc: int, cores: int | None, *, force: bool = False, free: int | None = None) -> None:
    """Refuse more processes than this node has memory for, or (`cores` given: they compute on the CPU) cores.

    The model itself is left out: all ranks together hold it once, however many there are.

    Args:
        force: Print the same as a warning, and continue.
        free: Bytes of memory; None asks the system.

    Raises:
        UserInputError: with the numbers, and how many processes fit.
    """
    free = free_memory() if free is None else free
    problems, most = [], nproc
    if free is not None and nproc * LEAST_BYTES > free:
        needed = nproc * LEAST_BYTES / 2**30
        problems.append(
            f"{nproc} processes need at least {needed:.1f} GiB of memory ({LEAST_BYTES / 2**30:.2f} GiB each, before "
            f"any weights are loaded); {free / 2**30:.1f} GiB are available"
        )
        most = min(most, free // LEAST_BYTES)
    if cores is not None and nproc > PER_CORE * cores:
        problems.append(f"{nproc} processes would share {cores} CPU core{'s' if cores > 1 else ''}")
        most = min(most, PER_CORE * cores)
    if not problems:
        return
    what, why = f"This machine cannot run {nproc} processes.", "; ".join(problems) + "."
    if not force:
        fix = f"Set --nproc (parallel.nproc) to {most} or less" if most else "Free memory"
        raise UserInputError(what, why=why, fix=f"{fix}, or pass --force to start them anyway.")
    text = three_parts(what, why, "Continuing because of --force.").replace("error", "warning", 1)
    print(fitted(text, sys.stderr), file=sys.stderr)
