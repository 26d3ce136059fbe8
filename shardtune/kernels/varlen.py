"""How do packed documents stay apart on a GPU? Variable-length attention: no mask, no padding, one call per layer.

The eager twin is transformers' own SDPA with the block-diagonal mask it derives from `position_ids`.
"""

from __future__ import annotations

from typing import Any

import torch

from shardtune.kernels.attention_names import VARLEN

NAME = VARLEN
# What transformers hands down to every attention call, and what changes nothing about its result.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch"}
)


def register() -> None:
    """Make `attn_implementation: shardtune_varlen` known to transformers. Safe to call again."""
    from transformers import AttentionInterface

    # No mask function beside it: transformers then makes no mask at all. With one, it first looks for documents in the
    # positions and reads the answer back, and the host waits for the GPU in every pass.
    AttentionInterface.register(NAME, varlen_attention)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document of a flat batch.

    Args:
        query: [1, heads, tokens, head_dim]; key and value likewise, perhaps with fewer heads.
        cu_seq_lens_q: The documents' bounds (int32, documents + 1), and `max_length_q` their longest, as the collator
            makes them; those of keys are the same.

    Returns:
        [1, tokens, heads, value_dim], and None for the weights.

    Raises:
        ValueError: there is a mask or dropout, attention is not causal, or the model asks for what is not computed.
    """
    from torch.nn.attention.varlen import varlen_attn

    refuse_unknown_keywords(NAME, {"attention_mask": attention_mask is not None, "dropout": dropout > 0, **others})
    if is_causal is False or cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(f"{NAME} is causal attention within the documents of a flat batch, and needs their bounds.")
    bounds, longest = cu_seq_lens_q, int(max_length_q)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    value_dim = v.shape[-1]
    if value_dim != q.shape[-1]:  # MLA: values are narrower than queries, and flash attention wants one width
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - value_dim))
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window)
    assert isinstance(out, torch.Tensor)
    return out[..., :value_dim].unsqueeze(0), None


def refuse_unknown_keywords(kernel: str, keywords: dict[str, Any]) -> None:
    """That nothing the model asks of its attention is lost.

    Raises:
        ValueError: a keyword with a value that the kernel does not compute, such as `softcap` or `s_aux`.
    """
    asked = [
        n for n, value in keywords.items() if n not in _WITHOUT_EFFECT and value is not None and value is not False
    ]
    if asked:
        raise ValueError(f"{kernel} does not compute {', '.join(sorted(asked))}: set model.attn_implementation: eager.")
