"""What machine is this? Seen through torch, for the facts that `resolve` goes by."""

from __future__ import annotations

from pathlib import Path

import torch

from shardtune.machine import memory_limit
from shardtune.plan.facts import Machine


def machine_of(device: torch.device, nodes: tuple[int, ...], processes_here: int) -> Machine:
    on_cpu, host = device.type == "cpu", memory_limit()
    return Machine(
        device=device.type,
        memory=host // processes_here if on_cpu else torch.cuda.get_device_properties(device).total_memory,
        processes_here=processes_here,
        nodes=nodes,
        gpu="" if on_cpu else torch.cuda.get_device_name(device),
        host_memory=host,
        lacks_bf16=on_cpu and _cpu_lacks_bf16(),
    )


def _cpu_lacks_bf16() -> bool:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False  # not Linux: nothing to go by
    return not flags & {"avx512_bf16", "amx_bf16", "bf16"}
