"""The recipes that ship must load, whatever changes in the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_without_notices(recipe: Path) -> None:
    resolved = load_config(recipe, environ={})
    # Who submits a job has the section `cluster` for it; that `train` does not read it is what the notice is for.
    expected = [] if resolved.config.cluster.target is None else ["the section `cluster` is not read by `train`"]
    assert [notice.partition(";")[0] for notice in resolved.notices] == expected
    assert resolved.config.model.model_name_or_path


def test_there_are_recipes() -> None:
    assert RECIPES
