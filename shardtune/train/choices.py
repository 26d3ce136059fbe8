"""What did `auto` turn out to be? Settles what the config left open, once the machine is known, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig


def settle_autos(resolved: ResolvedConfig, *, device: str, processes_here: int) -> ResolvedConfig:
    """Every `auto` replaced by its value; `origins` then tell that it was chosen, and why."""
    config = resolved.config
    if config.parallel.device == "auto":
        resolved = resolved.with_auto("parallel.device", device, f"torch sees {device}")
    if config.parallel.nproc == "auto":
        resolved = resolved.with_auto("parallel.nproc", processes_here, "processes started on this machine")
    if config.model.attn_implementation == "auto":
        resolved = resolved.with_auto("model.attn_implementation", "sdpa", "torch's own fused attention")
    if config.train.bf16 == "auto":
        held = config.model.torch_dtype
        resolved = resolved.with_auto("train.bf16", held == "bfloat16", f"the model is held in {held}")
    if config.train.eval_strategy == "auto":
        given = config.data.val_split is not None
        resolved = resolved.with_auto(
            "train.eval_strategy", "steps" if given else "no", f"data.val_split is {'given' if given else 'null'}"
        )
    if config.data.train_on == "auto":
        templated = config.data.prompt_template is not None
        resolved = resolved.with_auto(
            "data.train_on",
            "completion" if templated else "all",
            f"prompt_template is {'given' if templated else 'null'}",
        )
    return resolved


def slow_precision_notice(torch_dtype: str, device: str) -> str | None:
    """What to tell someone who trains in bfloat16 on a CPU that has no units for it."""
    if device != "cpu" or torch_dtype != "bfloat16":
        return None
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return None  # not Linux: nothing to go by
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return None
    return (
        "model.torch_dtype is bfloat16, but this CPU has no bfloat16 units: expect steps many times slower. "
        "Set model.torch_dtype: float32."
    )
