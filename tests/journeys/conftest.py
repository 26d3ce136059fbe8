from __future__ import annotations

from pathlib import Path

import pytest
from journey import Journey


@pytest.fixture
def journey(tmp_path: Path) -> Journey:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    return Journey(folder, home)
