"""What the tests of adapters share: the computation of expert adapters is another module's business and has its own."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.adapters import lora


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """PEFT's own computation of adapters on parameters, as whoever loads them elsewhere has it; lists the models whose
    experts have some."""
    switched: list[Any] = []
    monkeypatch.setattr(lora, "use_grouped_products", lambda model: switched.append(model) or 0)
    monkeypatch.setattr(lora, "use_linear_products", lambda model: 0)
    return switched
