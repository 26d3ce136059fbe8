"""Does the base fit in full precision? Arithmetic on bytes, for `model.base_precision: auto`."""

from __future__ import annotations

SHARE_FOR_WEIGHTS = 0.6  # the rest is for gathered layers, activations, adapters and their optimizer


def base_precision(*, quantised: int, parameters: int, value_bytes: int, ranks: int, memory: int) -> tuple[str, str]:
    """`bf16` or `fp8` for a checkpoint, and why.

    Args:
        quantised: Parameters that are stored in float8.
        parameters: Of the whole base.
        value_bytes: Of one parameter that is not held in float8 (2 for bf16).
        ranks: Over which the base is sharded.
        memory: Bytes one rank has.
    """
    if quantised == 0:
        return "bf16", "the checkpoint is not quantised"
    full = parameters * value_bytes / ranks
    held = (quantised + (parameters - quantised) * value_bytes) / ranks
    full_gib, held_gib, memory_gib = (amount / 2**30 for amount in (full, held, memory))
    sizes = f"{full_gib:.1f} GiB per rank dequantised, {held_gib:.1f} GiB in float8, of {memory_gib:.1f} GiB"
    if full <= SHARE_FOR_WEIGHTS * memory:
        return "bf16", f"it fits dequantised: {sizes}"
    return "fp8", f"dequantised it would leave too little memory: {sizes}"
