"""What does a key mean that config.json leaves out? transformers' defaults by model type, kept as data: no torch.

`python -m shardtune.model.families.config_defaults` writes the file anew (`make reference`); it needs transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")


def config_defaults(model_type: str) -> Mapping[str, Any]:
    """Plain values that transformers' config class fills in; of a wrapper only what it decides for its text model."""
    return _stored().get(model_type, {})


@cache
def _stored() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def current_defaults() -> dict[str, dict[str, Any]]:
    """The same from the installed transformers."""
    from dataclasses import fields

    from transformers import CONFIG_MAPPING, PretrainedConfig

    from shardtune.model.families.registry import families

    def plain(model_type: str) -> dict[str, Any]:
        own = {field.name: field.default for field in fields(CONFIG_MAPPING[model_type])}
        known = {field.name for field in fields(PretrainedConfig)}
        return {
            name: value
            for name, value in sorted(own.items())
            if name not in known and isinstance(value, bool | int | float | str) and not name.endswith("_token_id")
        }

    of_text = {kind: plain(kind) for family in families() for kind in family.model_types}
    wrappers = {wrapper.model_type for family in families() for wrapper in family.wrappers}
    of_wrappers = {kind: {"tie_word_embeddings": plain(kind)["tie_word_embeddings"]} for kind in wrappers}
    return {**dict(sorted(of_wrappers.items())), **dict(sorted(of_text.items()))}


def rendered(defaults: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each model type, so that a change shows where it is."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(kind)}: {json.dumps(values)}" for kind, values in defaults.items()) + "\n}\n"
    )


if __name__ == "__main__":
    _FILE.write_text(rendered(current_defaults()), encoding="utf-8")
