"""Which settings do people look for that are not here, why, and what to use instead?"""

from __future__ import annotations

# Key, wherever it is written: (why there is no such setting, what to do).
UNSUPPORTED: dict[str, tuple[str, str]] = {
    "streaming": (
        "rows are not streamed: they are tokenised once, written to data.cache_dir (5 bytes per token) and read from "
        "there by memory map, so memory does not grow with the dataset",
        "remove it; `shardtune data prepare CONFIG` does the work ahead of time",
    ),
}
