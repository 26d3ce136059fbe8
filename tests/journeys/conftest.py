from __future__ import annotations

from pathlib import Path

import pytest
from journey import Journey
from toys import toy_chat_llama


@pytest.fixture
def journey(tmp_path: Path) -> Journey:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    return Journey(folder, home)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with a byte-level tokenizer and a chat template, which adds a system turn where a row has none."""
    return toy_chat_llama(tmp_path_factory.mktemp("chat-model"))
