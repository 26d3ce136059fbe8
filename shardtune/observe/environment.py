"""What did a run use? Versions and machine, recorded with every run."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardtune.config.redact import HIDDEN, hide_text, is_secret

_PACKAGES = (
    "shardtune", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "pydantic",
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


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command line of this process, as one would type it; secrets are hidden.

    Example:
        >>> command_line(["/venv/bin/shardtune", "train", "run.yaml", "-o", "train.hub_token=abc"])
        "shardtune train run.yaml -o 'train.hub_token=***'"
    """
    program, *words = sys.argv if argv is None else argv
    path = Path(program)
    ours = path.name == "__main__.py" and path.parent.name == "shardtune"  # python -m shardtune
    shown = ["shardtune"] if ours else ["python", program] if path.suffix == ".py" else [path.name]
    before = ""
    for word in words:
        key, equals, _ = word.partition("=")
        if before.startswith("-") and is_secret(before.lstrip("-")):
            word = HIDDEN
        elif equals and is_secret(key.lstrip("-")):
            word = f"{key}={HIDDEN}"
        shown.append(hide_text(word))
        before = word
    return shlex.join(shown)
