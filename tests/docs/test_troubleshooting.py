"""docs/troubleshooting.md: every known failure has its symptom, cause and fix, and what it says the code does, the code does."""

from __future__ import annotations

import re

import pytest
from running import REPOSITORY

from shardtune.config.suggestions import section_fields
from shardtune.run.error_codes import BY_CODE, code_of_message

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^### (.*?)\n\n(.*?)(?=^###? )", PAGE.partition("## Error codes")[0] + "## ", re.DOTALL | re.MULTILINE)
)
SYMPTOMS = re.findall(r"^\| (.*?) \| \[`([\w-]+)`\]", PAGE, re.MULTILINE)
# What each section says happens here, in the words of the code: file and text.
HERE = {
    "Out of memory while all ranks load": ("train/weights.py", "load each rank's own slices only"),
    "Adapters do not train": ("train/proof.py", "received a gradient and did not change"),
    "Checkpoints have the size of the model": ("checkpoint/adapter.py", "Only what trains is ever gathered"),
    "Collectives time out": ("run/exit_codes.py", "its deadline ended the run"),
    "Tokenizers and forks": ("launch/safe_defaults.py", "TOKENIZERS_PARALLELISM"),
    "The best model is not loaded at the end": ("config/cross_checks.py", "this run does not evaluate"),
    "Nodes do not find each other": ("launch/connect.py", "Could not connect to the master"),
    "A model class is missing": ("doctor/versions.py", '"model class"'),
}


def test_every_known_failure_has_a_section() -> None:
    assert set(SECTIONS) == set(HERE)


@pytest.mark.parametrize("section", HERE)
def test_a_section_has_symptom_cause_and_fix_and_the_code_does_what_it_says(section: str) -> None:
    assert re.findall(r"^\*\*(\w+)\.\*\*", SECTIONS[section], re.MULTILINE) == ["Symptom", "Cause", "Fix"]
    file, words = HERE[section]
    source = re.sub(r'"\s*\n\s*f?"', "", (REPOSITORY / "shardtune" / file).read_text(encoding="utf-8"))
    assert words in source


def test_the_settings_it_names_exist() -> None:
    fields = section_fields()
    named = re.findall(rf"`({'|'.join(fields)})\.(\w+)`", PAGE)
    assert len(named) > 3
    assert [f"{section}.{key}" for section, key in named if key not in fields[section].model_fields] == []


def test_a_message_leads_to_the_code_that_explain_finds_for_it() -> None:
    assert len(SYMPTOMS) > 8
    for shown, code in SYMPTOMS:
        for message in re.findall(r"`([^`]+)`", shown):
            assert code_of_message(message) == code, message


def test_the_messages_that_other_pages_explain_are_printed() -> None:
    sources = [file.read_text(encoding="utf-8") for file in sorted((REPOSITORY / "shardtune").rglob("*.py"))]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    table = (REPOSITORY / "docs" / "export.md").read_text(encoding="utf-8").partition("## When it fails")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 4
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in code] == []


def test_every_error_code_is_there() -> None:
    assert re.findall(r"^### ([\w-]+)$", PAGE.partition("## Error codes")[2], re.MULTILINE) == list(BY_CODE)
