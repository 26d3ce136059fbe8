"""Is this rank's GPU nearly full, or throttling? Not known for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardtune.observe.gpu_meter import gpu_uuid, throttle_reasons

# A GPU at its power limit (sw_power_cap) is busy, not throttled by a fault.
_TROUBLE = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}


@dataclass(frozen=True)
class Gpu:
    """The two readings of a GPU, as functions, so that a test can supply them.

    Attributes:
        memory: Peak bytes allocated, and the bytes available to this process.
        throttle: Active throttle reasons other than the ordinary power limit.
    """

    memory: Callable[[], tuple[int, int]]
    throttle: Callable[[], Sequence[str]]


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU this rank computes on; None on a CPU."""
    if device.type != "cuda":
        return None
    return Gpu(memory=lambda: _memory(device), throttle=_throttle_reader(device))


def _memory(device: torch.device) -> tuple[int, int]:
    total = torch.cuda.get_device_properties(device).total_memory
    share = torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.max_memory_allocated(device), int(total * share)


def _throttle_reader(device: torch.device) -> Callable[[], Sequence[str]]:
    import pynvml

    try:
        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
    except pynvml.NVMLError:  # a container without NVML: what cannot be known is not guarded
        return tuple

    def read() -> Sequence[str]:
        try:
            active = throttle_reasons(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except pynvml.NVMLError:
            return ()
        return [reason for reason in active if reason in _TROUBLE]

    return read
