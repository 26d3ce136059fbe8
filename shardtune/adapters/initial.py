"""What do the adapters start from? Values drawn from the seed by name: the same on every rank, however many."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardtune.errors import ShardtuneError

if TYPE_CHECKING:
    from peft import PeftModel


def draw_adapters(model: PeftModel, seed: int) -> str:
    """Fill the adapters of a model whose memory holds nothing yet; returns a fingerprint of all values.

    As PEFT does: A uniform within ±1/√fan-in (kaiming_uniform with a = √5), B zero. Each tensor has a generator of its
    own, seeded with the run's seed and its name, so that neither the order of modules nor the sharding matters. Every
    rank draws a whole tensor and keeps its slice; the largest (all experts of a layer) is some tens of megabytes.
    """
    fingerprint = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=_generator(seed, name))
        elif ".lora_B." in name:
            whole = torch.zeros(parameter.shape)
        elif "lora_" in name:
            raise ShardtuneError(f"'{name}' is an adapter that is not initialised here.", fix="Please report this.")
        else:
            continue
        fingerprint.update(name.encode())
        fingerprint.update(whole.numpy().tobytes() if ".lora_A." in name else b"")
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                whole = whole.to(parameter.to_local().device)
                parameter.copy_(
                    distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                )
            else:
                parameter.copy_(whole)
    return fingerprint.hexdigest()


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
