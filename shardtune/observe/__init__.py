"""What is happening? Events on disk for machines, lines and bars on the terminal for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtune.observe.profiler import LLMStepProfiler

__all__ = ["LLMStepProfiler"]


def __getattr__(name: str) -> Any:
    """`from shardtune.observe import LLMStepProfiler`, and no torch for those who want something else from here."""
    if name == "LLMStepProfiler":
        from shardtune.observe.profiler import LLMStepProfiler

        return LLMStepProfiler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
