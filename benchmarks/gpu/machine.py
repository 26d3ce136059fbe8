"""On what was it measured? Chip, versions, date and commit, without opening the device."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "liger_kernel")


def about_machine(commit: str | None, root: Path, unsloth_site: Path | None) -> dict[str, object]:
    versions = {name: _version(name) for name in _PACKAGES}
    for found in unsloth_site.glob("unsloth-*.dist-info") if unsloth_site is not None else ():
        versions["unsloth"] = found.name.removeprefix("unsloth-").removesuffix(".dist-info")
    return {
        "chip": chip(), "versions": versions,
        "date": datetime.now(UTC).date().isoformat(), "commit": commit or described(root),
    }  # fmt: skip


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def chip() -> str:
    """The GPU and its driver, or the CPU where there is none."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return f"no GPU, {platform.machine()}"
    if found.returncode != 0:
        return f"no GPU, {platform.machine()}"
    name, memory, driver = (part.strip() for part in found.stdout.splitlines()[0].split(","))
    return f"{name} ({memory}, driver {driver})"


def described(root: Path) -> str:
    """`git describe`, or "unknown" where there is no repository."""
    words = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
