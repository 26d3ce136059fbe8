"""The smallest config there is, and the types of the fixtures in conftest.py."""

from __future__ import annotations

from collections.abc import Callable

from shardtune.config import ResolvedConfig

SMALLEST = "model: {model_name_or_path: gpt2}\ndata: {dataset_name_or_path: rows.jsonl}\n"

Load = Callable[..., ResolvedConfig]
Report = Callable[..., str]
