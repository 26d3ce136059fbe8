"""How do tensors get onto a disk? Safetensors, readable by all, and a full disk is the OSError it is."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from shardtune.durable import library_os_errors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one safetensors file, mode 0644.

    Raises:
        OSError: the disk is full, or any other thing the system says (the library wraps it in an error of its own).
    """
    with library_os_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors 0.8 writes 0600: other users of a shared volume could not read it
