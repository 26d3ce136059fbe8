"""What the tests of adapters share: the computation of expert adapters is another module's business and has its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """PEFT's own computation of expert adapters, as whoever loads the adapter elsewhere has it; lists the models."""
    switched: list[Any] = []
    stand_in = ModuleType("shardtune.adapters.experts")
    stand_in.use_grouped_products = lambda model: switched.append(model) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardtune.adapters.experts", stand_in)
    return switched
