"""How does attention run over whole rows? torch's own, causal, and nobody asks for a mask.

transformers looks at the positions or the mask of every batch to find out whether it needs one, and reads the answer
back from the device: the host waits there in every pass. Rows are padded at their end, where nothing real looks, so
that the answer is known. The eager twin is transformers' `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shardtune.kernels.attention_names import WHOLE_ROWS
from shardtune.kernels.varlen import refuse_unknown_keywords

NAME = WHOLE_ROWS


def register() -> None:
    """Make `attn_implementation: shardtune_whole_rows` known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, whole_rows_attention)  # no mask function beside it: no mask is made


def whole_rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa` over rows that are shorter than any window.

    Raises:
        ValueError: the rows are not, there is a mask, or the model asks for what `sdpa` does not compute.
    """
    beyond = sliding_window is not None and sliding_window < query.shape[2]
    refuse_unknown_keywords(NAME, {"attention_mask": attention_mask is not None, "sliding_window": beyond, **others})
    out, _ = sdpa_attention_forward(
        module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=is_causal
    )
    return out, None
