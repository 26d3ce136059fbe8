"""How does attention run over whole rows? torch's own, causal, and nobody asks for a mask.

transformers looks at the positions or the mask of every batch to find out whether it needs one, and reads the answer
back from the device: the host waits there in every pass. Rows are padded at their end, where nothing real looks, so
that the answer is known. The eager twin is transformers' `sdpa`.
"""

from __future__ import annotations

from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "shardtune_whole_rows"


def register() -> None:
    """Make `attn_implementation: shardtune_whole_rows` known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, sdpa_attention_forward)  # no mask function beside it: no mask is made


def usable(config: PretrainedConfig, longest: int) -> bool:
    """Whether a token sees all tokens before it, in every layer, in rows of up to `longest` tokens."""
    reach = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None) or []
    return all(far is None or far >= longest for far in reach) and set(kinds) <= {"full_attention"}
