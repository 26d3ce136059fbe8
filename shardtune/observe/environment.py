"""On what did it run? Versions and machine, recorded beside every run."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "shardtune", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "pydantic",
    "liger-kernel",
)  # fmt: skip


def describe() -> dict[str, object]:
    """Library versions, Python, host, CPUs and (when torch sees any) GPUs."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
