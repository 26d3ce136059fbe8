"""What machine is this? Host, GPUs, networks and libraries as plain facts: what `shardtune env --json` prints."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtune.config.redact import HIDDEN, hide_text, is_secret
from shardtune.observe.environment import describe_software, installed_version
from shardtune.observe.gpus import describe_gpus
from shardtune.observe.host import describe_host

_PREFIXES = (
    "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "NVIDIA_VISIBLE", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_",
    "RDMAV_", "SHARDTUNE_",
)  # fmt: skip


def describe_hardware(
    folder: Path | None = None,
    *,
    nvml: Any = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Everything that `shardtune env --json` prints, plain types only. Does not import torch.

    Args:
        folder: Where runs are written; the disk it is on is described.
        nvml: The module `pynvml`, or what stands for it in a test.
        root: Where `/proc` and `/sys` are; another one in tests.
        environ: Where variables of NCCL, torch and CUDA are looked for. Secrets are hidden.
    """
    facts = {**describe_host(root, folder), **describe_gpus(nvml)}
    cuda = {"driver": facts.pop("cuda_driver", None), "torch": _torch_cuda()}
    facts["cuda"] = {name: version for name, version in cuda.items() if version}
    if version := _nccl():
        facts["nccl"] = version
    facts["variables"] = {
        name: HIDDEN if is_secret(name) else hide_text(value)
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES)
    }
    return {**facts, **describe_software()}


def _torch_cuda() -> str | None:
    """The CUDA version torch was built for, from its version file: importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).with_name("version.py") if found is not None and found.origin else None
    if file is None or not file.is_file():
        return None
    return runpy.run_path(str(file)).get("cuda")


def _nccl() -> str | None:
    """NCCL's version from torch, if it is imported; else from the wheel; else from the library itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.distributed.is_nccl_available():
        return ".".join(map(str, torch.cuda.nccl.version()))
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        if version := installed_version(name):
            return version
    try:
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"
