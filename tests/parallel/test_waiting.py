"""Ranks that wait for data do so without a collective, however long it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import on_ranks


@pytest.mark.slow
def test_a_rank_may_come_later_than_the_collective_timeout(environment: dict[str, str], tmp_path: Path) -> None:
    worker = Path(__file__).parent / "waiting_worker.py"
    on_ranks(environment, worker, 2, 8, 14, tmp_path)
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)] == ["True", "True"]
