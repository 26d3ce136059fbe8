"""Which settings of earlier versions are gone, and what takes their place? CHANGELOG.md lists the same ones."""

from __future__ import annotations

from collections.abc import Mapping

# In a message that begins "`parallel.timeout_minutes` is gone: ".
RENAMED: Mapping[str, str] = {
    "parallel.timeout_minutes": "write `parallel.step_timeout_minutes`, `load_timeout_minutes`, "
    "`checkpoint_timeout_minutes` or `join_timeout_minutes`; each phase has a limit of its own",
    "train.extra": "its entries are settings of their own",
}
