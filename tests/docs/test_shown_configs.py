"""Every config that a page shows is one: its keys exist, its values are allowed, and whole ones load without a problem."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import REPOSITORY

from shardtune.config import load_config
from shardtune.config.suggestions import section_fields

SECTIONS = set(section_fields())
NEEDED: dict[str, Any] = {
    "model": {"model_name_or_path": "/models/llama"},
    "data": {"dataset_name_or_path": "/data/train", "val_split": "validation"},
}


def shown_configs() -> list[tuple[str, dict[str, Any]]]:
    """YAML blocks whose keys are sections; what they leave out is not needed for what they show."""
    found = []
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for number, block in enumerate(blocks):
            content = yaml.safe_load(block)
            if isinstance(content, dict) and set(content) <= SECTIONS:
                found.append((f"{page.name}-{number}", content))
    return found


CONFIGS = shown_configs()


def test_there_are_configs_on_the_pages() -> None:
    assert len(CONFIGS) > 15
    assert {"README", "own-data", "cluster", "from-trl"} <= {name.partition(".md")[0] for name, _ in CONFIGS}


@pytest.mark.parametrize(("name", "content"), CONFIGS, ids=[name for name, _ in CONFIGS])
def test_a_config_of_a_page_is_valid(name: str, content: dict[str, Any], tmp_path: Path, home: Path) -> None:
    for section, values in NEEDED.items():
        content[section] = {**values, **(content.get(section) or {})}
    content.get("cluster", {}).pop("profile", None)  # what it names is in a file of the reader
    content.get("parallel", {}).pop("accelerate_config", None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    resolved = load_config(tmp_path / "run.yaml", environ={})
    useless = [notice for notice in resolved.notices if "`cluster`" not in notice]
    assert useless == []


def test_the_page_about_clusters_shows_the_section_of_the_recipe_that_it_names() -> None:
    page = (REPOSITORY / "docs" / "cluster.md").read_text(encoding="utf-8").partition("## The `cluster` section\n")[2]
    recipe = yaml.safe_load((REPOSITORY / "configs" / "two-nodes-on-a-cluster.yaml").read_text(encoding="utf-8"))
    assert yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0]) == {"cluster": recipe["cluster"]}
