"""What is happening? Events on disk for machines, lines and bars on the terminal for people."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtune.observe.hardware_summary import print_hw_summary
    from shardtune.observe.profiler import LLMStepProfiler

__all__ = ["LLMStepProfiler", "print_hw_summary"]

_HOMES = {"LLMStepProfiler": "profiler", "print_hw_summary": "hardware_summary"}


def __getattr__(name: str) -> Any:
    """`from shardtune.observe import LLMStepProfiler`, and no torch for those who want something else from here."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
