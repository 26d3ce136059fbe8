"""What tests of evaluations share."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluated_run import fake_run
from toys import toy_llama, toy_rows


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    return fake_run(folder, toy_llama(folder / "model"), toy_rows(folder / "data", val_rows=35))
