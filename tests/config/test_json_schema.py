"""Do the JSON Schema and the reference page say what the fields say?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

import shardtune
from shardtune.config.reference import json_schema, reference_page
from shardtune.config.refused import OTHER_NAMES, TRL_NAMES
from shardtune.config.suggestions import FOREIGN_KEYS, section_fields

GOOD: dict[str, Any] = {
    "model": {"model_name_or_path": "gpt2"},
    "data": {"dataset_name_or_path": "d", "val_split": None},
    "lora": {"r": 4, "target_modules": ["q_proj"]},
    "train": {"bf16": "auto", "optim_args": {"amsgrad": True}},
    "parallel": {"nproc": 2},
}


@pytest.fixture
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    return jsonschema.Draft202012Validator(schema)


def test_a_good_config_fits_the_schema(validator: jsonschema.Draft202012Validator) -> None:
    assert list(validator.iter_errors(GOOD)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"learnng_rate": 1}}, {"lora": {"r": 0}}, {"lora": {"r": "x"}}, {"train": {"packing": 3}}, {"trainn": {}},
        {"model": {}}, {"train": {"lr_scheduler_type": "cosin"}}, {"extends": 5}, {"parallel": {"nproc": 0}},
    ],
)  # fmt: skip
def test_a_bad_config_does_not(validator: jsonschema.Draft202012Validator, change: dict[str, Any]) -> None:
    assert list(validator.iter_errors(GOOD | change))


def test_required_sections_are_required_unless_the_file_extends_another(
    validator: jsonschema.Draft202012Validator,
) -> None:
    assert list(validator.iter_errors({"train": {}}))
    assert not list(validator.iter_errors({"extends": "base.yaml", "model": {"revision": "main"}}))
    assert not list(validator.iter_errors({"extends": ["a.yaml", "b.yaml"]}))


def test_every_setting_has_a_title_and_a_description_in_the_schema() -> None:
    schema = json_schema()
    for name in section_fields():
        section = schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]]
        assert schema["properties"][name].get("description") or section["description"]
        for key, entry in section["properties"].items():
            assert len(entry.get("description", "")) > 5, f"{name}.{key}"
            assert entry.get("title"), f"{name}.{key}"


def test_the_reference_page_in_docs_is_up_to_date() -> None:
    page = Path(shardtune.__file__).parents[1] / "docs" / "config-reference.md"
    assert page.read_text(encoding="utf-8") == reference_page(), (
        "run: shardtune config reference > docs/config-reference.md"
    )


def test_the_reference_page_has_a_row_for_every_setting() -> None:
    page = reference_page()
    for name, section in section_fields().items():
        part = page.split(f"## `{name}`\n")[1].split("\n## ")[0]
        for key, field in section.model_fields.items():
            assert f"| `{key}` |" in part
            assert field.description and field.description.replace("|", "\\|") in part


def test_every_foreign_spelling_leads_to_a_setting_and_is_none_itself() -> None:
    sections = section_fields()
    assert not FOREIGN_KEYS.keys() & {*TRL_NAMES, *OTHER_NAMES}
    for foreign, meant in FOREIGN_KEYS.items():
        section, _, key = meant.partition(".")
        assert key in sections[section].model_fields, foreign
        assert not any(foreign in model.model_fields for model in sections.values()), foreign
