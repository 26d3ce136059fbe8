"""What are our attention kernels called in `model.attn_implementation`? Here, so that a plan knows without torch."""

from __future__ import annotations

VARLEN = "shardtune_varlen"
WHOLE_ROWS = "shardtune_whole_rows"
