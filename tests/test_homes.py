"""Does a test see what its user, or another test, has left in a HOME?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtune.config.schema import DataSection
from shardtune.data.cache import cache_folder
from shardtune.quickstart.weights import default_cache


@pytest.mark.parametrize("time", ["first", "second"])
def test_every_test_has_an_empty_home_and_keeps_its_caches_there(
    time: str, home: Path, environment: dict[str, str]
) -> None:
    assert list(home.iterdir()) == []
    assert Path.home() == home == Path(environment["HOME"])
    for cache in (cache_folder(DataSection(dataset_name_or_path="x")), default_cache()):
        assert cache.is_relative_to(home)
        cache.mkdir(parents=True, exist_ok=True)
    import huggingface_hub.constants

    assert Path(huggingface_hub.constants.HF_HOME).is_relative_to(home.parent)  # read once, when it was imported


def test_a_module_may_share_one_home(shared_environment: dict[str, str]) -> None:
    assert shared_environment["HOME"] != os.environ["HOME"]
    assert Path(shared_environment["HOME"]).is_dir()
