"""What does an editor need to check a config while it is typed? JSON Schema, made from the fields themselves."""

from __future__ import annotations

from typing import Any

from shardtune.config.schema import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a config file.

    A file that extends another may leave required keys to it, so they are required only where there is no `extends`.
    A `${VAR}` in place of a number is for shardtune to expand; an editor will underline it.
    """
    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    required = {}
    for name in schema["properties"]:
        section = definitions[schema["properties"][name]["$ref"].rpartition("/")[2]]
        keys = section.pop("required", None)
        if keys:
            required[name] = {"required": keys}
    names = schema.pop("required")
    schema["properties"]["extends"] = {
        "title": "Extends",
        "description": "Config files merged under this one, relative to it; later ones win, this file over all.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {
        "$schema": DIALECT,
        **schema,
        "title": "shardtune run",
        "if": {"required": ["extends"]},
        "then": {},
        "else": {"required": names, "properties": required},
    }
