"""Which keywords of an attention call may a kernel leave aside? All others have a meaning it would silently drop."""

from __future__ import annotations

from typing import Any

# What transformers hands down to every attention call, and what changes nothing about its result.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch"}
)


def refuse_unknown(kernel: str, keywords: dict[str, Any]) -> None:
    """That nothing the model asks of its attention is lost.

    Raises:
        ValueError: a keyword with a value that the kernel does not compute, such as `softcap` or `s_aux`.
    """
    asked = [
        n for n, value in keywords.items() if n not in _WITHOUT_EFFECT and value is not None and value is not False
    ]
    if asked:
        raise ValueError(f"{kernel} does not compute {', '.join(sorted(asked))}: set model.attn_implementation: eager.")
