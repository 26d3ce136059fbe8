"""Every ready recipe is a valid config."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import REPOSITORY

from shardtune.config import load_config

RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.name for path in RECIPES])
def test_a_recipe_is_valid_as_it_is(recipe: Path) -> None:
    resolved = load_config(recipe, [], None, {})
    assert resolved.config.lora.target_modules
    assert resolved.config.train.max_steps == -1 or resolved.config.train.max_steps > 0
