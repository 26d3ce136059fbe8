"""Where do the random numbers stand? Every generator a step may draw from, as one small safetensors blob per rank."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save


def pack_rng(device: torch.device) -> bytes:
    """The state of torch (CPU, and `device` where it is a GPU), numpy and Python's random. No pickle."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    about = {
        "numpy": {"kind": kind, "position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
        "python": {"version": version, "gauss": gauss},
    }
    tensors = {
        "torch_cpu": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
        "about": torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8),
    }
    if device.type == "cuda":
        tensors["torch_cuda"] = torch.cuda.get_rng_state(device)
    return save(tensors)


def load_rng(blob: bytes, device: torch.device) -> None:
    """Set every generator to where `pack_rng` found it."""
    tensors = load(blob)
    about: dict[str, Any] = json.loads(tensors["about"].numpy().tobytes())
    torch.set_rng_state(tensors["torch_cpu"])
    said = about["numpy"]
    np.random.set_state(
        (
            said["kind"],
            tensors["numpy"].numpy().astype(np.uint32),
            said["position"],
            said["has_gauss"],
            said["cached"],
        )
    )
    words = tuple(int(word) for word in tensors["python"])
    random.setstate((about["python"]["version"], words, about["python"]["gauss"]))
    if device.type == "cuda" and "torch_cuda" in tensors:
        torch.cuda.set_rng_state(tensors["torch_cuda"], device)
