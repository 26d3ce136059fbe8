"""`shardtune` as one rank of several on the same GPU: NCCL takes one process per card, so that all groups are gloo's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_open = dist.init_process_group


def _with_gloo(_backend: str, **how: Any) -> None:
    _open("gloo", **{**how, "device_id": None})


if __name__ == "__main__":
    dist.init_process_group = _with_gloo
    torch.cuda.set_per_process_memory_fraction(0.2)
    from shardtune.cli.main import main

    main()
