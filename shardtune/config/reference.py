"""What can be set? The reference page, the table for a terminal and the JSON Schema, all made from the fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo

from shardtune.config.expected import expected
from shardtune.config.fields import Section
from shardtune.config.refused import TRL_NAMES
from shardtune.config.render import flow
from shardtune.config.schema import RunConfig
from shardtune.config.suggestions import section_fields

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEAD = """\
# Config reference

<!-- Generated: shardtune config reference > docs/config-reference.md -->

One YAML describes a run. Only `model.model_name_or_path` and `data.dataset_name_or_path` are required.

- **Files**: `extends: base.yaml` (or a list) merges other files under this one; paths are relative to the file that
  says it, later files win, mappings are merged, lists replaced. A config is a regular file (or a link to one) of
  at most 1 MiB; no message repeats words of a file that is not a config.
- **Overrides**: `-o train.learning_rate=5e-5 -o lora.target_modules=[q_proj,v_proj] -o data.val_split=null`. They win
  over the file.
- **Environment**: `${VAR}` and `${VAR:-default}` in values; `$${` is a literal `${`. The run uses the value; its
  files and reports, and `config show`, keep the reference. Where another value would change the run's numbers, a short
  SHA-256 digest of the value is kept too, to notice it: a value that can be guessed can be checked against it. What an
  adapter needs to be loaded (the model's name, `lora`) is in its `adapter_config.json` as it is, and prompts that
  `train.samples` shows are those the model gets.
- **Numbers and words**: `1e-4` is a number; only `true` and `false` are truth values, so `eval_strategy: no` is the
  word (a setting that is true or false still takes yes/no/on/off).
- `shardtune config show CONFIG` prints every value with where it came from, `config show --resolved` what each `auto`
  comes to on this machine, and why; `config validate` checks; `config schema`
  prints the JSON Schema for your editor.
"""

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_TRL = """\

## Names of TRL and transformers

Every field of TRL's `SFTConfig` (and of transformers' `TrainingArguments`, on which it builds) that is not in this
table is a setting of the same name: `max_length` in `data`, `trust_remote_code` and `use_cache` in `model`, all others
in `train`. A name in this table is refused with the same words.

| field | instead |
|---|---|
"""


def reference_page() -> str:
    """docs/config-reference.md."""
    parts = [_HEAD]
    for name, section in section_fields().items():
        parts.append(f"\n## `{name}`\n\n{section.__doc__}\n\n| key | value | default | meaning |\n|---|---|---|---|\n")
        parts += _rows(section)
    parts.append(_TRL)
    parts += [f"| `{name}` | {_cell(instead)} |\n" for name, instead in TRL_NAMES.items()]
    return "".join(parts)


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


def settings_table() -> RenderableType:
    """Every setting with its default and meaning, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Settings of CONFIG, and for --override", title_justify="left", box=None, padding=(0, 1))
    table.add_column("setting", no_wrap=True)
    table.add_column("default and meaning", ratio=1)
    for name, section in section_fields().items():
        for key, field in section.model_fields.items():
            default = "required" if field.is_required() else flow(field.get_default(call_default_factory=True))
            table.add_row(f"{name}.{key}", Text(f"{default}  ", style="dim") + Text(field.description or ""))
        table.add_section()
    return table


def first_sentence(description: str) -> str:
    return re.split(r"(?<=\.)\s", description, maxsplit=1)[0]


def _rows(section: type[Section]) -> Iterator[str]:
    for key, field in section.model_fields.items():
        yield f"| `{key}` | {_cell(expected(field))} | {_default(field)} | {_cell(field.description or '')} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value: Any = field.get_default(call_default_factory=True)
    return f"`{flow(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
