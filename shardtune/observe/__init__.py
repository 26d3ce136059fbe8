"""What is happening? Events on disk for machines, lines and bars on the terminal for people; and, for a script that
runs under `shardtune run`, what it tells of itself: `from shardtune import observe` (docs/run.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtune.observe.api import (
        current_step,
        load_checkpoint,
        log,
        phase,
        profile,
        run_dir,
        save_checkpoint,
        steps,
        stop_requested,
    )
    from shardtune.observe.hardware_summary import print_hw_summary
    from shardtune.observe.profiler import LLMStepProfiler

__all__ = [
    "LLMStepProfiler",
    "current_step",
    "load_checkpoint",
    "log",
    "phase",
    "print_hw_summary",
    "profile",
    "run_dir",
    "save_checkpoint",
    "steps",
    "stop_requested",
]

_HOMES = {"LLMStepProfiler": "profiler", "print_hw_summary": "hardware_summary"}


def __getattr__(name: str) -> Any:
    """`from shardtune.observe import LLMStepProfiler`, and no torch for those who want something else from here."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
