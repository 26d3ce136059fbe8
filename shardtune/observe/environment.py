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
        **describe_software(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def describe_software() -> dict[str, object]:
    """Python and the libraries a result depends on; imports none of them."""
    return {
        "packages": {name: found for name in _PACKAGES if (found := installed_version(name))},
        "python": sys.version.split()[0],
    }


def installed_version(name: str) -> str | None:
    """Of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
