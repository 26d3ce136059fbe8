"""What does the device say about its memory? A few numbers, so that a test can say them instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMGT]?i?B)")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True)
class Allocator:
    """Bytes: given out now; there are in all for this process; still to be had."""

    device: torch.device
    allocated: Callable[[], int]
    capacity: Callable[[], int]
    free: Callable[[], int]


def allocator_of(device: torch.device) -> Allocator | None:
    """torch's caching allocator of a CUDA device; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None

    def capacity() -> int:
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * torch.cuda.get_per_process_memory_fraction(device))

    def free() -> int:
        on_device, _ = torch.cuda.mem_get_info(device)
        return max(0, min(on_device, capacity() - torch.cuda.memory_reserved(device)))

    return Allocator(device, lambda: torch.cuda.memory_allocated(device), capacity, free)


def observe_shortage(callback: Callable[[int, int, int, int], None]) -> None:
    """Have `callback(device, wanted, capacity, free)` called the moment an allocation fails, while everything is alive.

    There is no way to take it back. A build of torch without CUDA has none.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(callback)


def wanted_in(message: str) -> int:
    """What an allocation asked for, from torch's message (two decimals); 0 where it does not say."""
    found = _WANTED.search(message)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0


def ran_out(error: BaseException | None) -> BaseException | None:
    """The shortage of device memory behind an error, if there is one."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        # Libraries that allocate by themselves (cuBLAS, NCCL) fail with words alone.
        if isinstance(error, RuntimeError) and re.search(r"CUDA.*out of memory|ALLOC_FAILED", str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None
