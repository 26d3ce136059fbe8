"""How do tensors get onto a disk? Safetensors, readable by all, and a full disk is the OSError it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one safetensors file, mode 0644.

    Raises:
        OSError: the disk is full, or any other thing the system says (the library wraps it in an error of its own).
    """
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number.group(1)), os.strerror(int(number.group(1))), str(path)) from error
    path.chmod(0o644)  # safetensors 0.8 writes 0600: other users of a shared volume could not read it
