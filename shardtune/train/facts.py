"""What machine is this? Seen through torch, for the facts that `resolve` goes by."""

from __future__ import annotations

import torch

from shardtune.machine import lacks_bf16, memory_limit
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
        lacks_bf16=on_cpu and lacks_bf16(),
    )
