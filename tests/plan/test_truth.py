"""What was measured on an H200, in benchmarks/plan_truth.json, against what the plan says today."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_peaks_and_steps_that_were_measured_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu"), *sys.path])
    import plan_truth

    rows = plan_truth.compare(ROOT / "benchmarks" / "plan_truth.json")
    print(plan_truth.table(rows))
    memory = [abs(row.allocated / row.peak - 1) for row in rows if row.peak]
    steps = [abs(row.seconds / row.step - 1) for row in rows if row.step]
    assert len(memory) >= 16 and statistics.median(memory) <= 0.03 and max(memory) <= 0.08
    assert len(steps) >= 16 and statistics.median(steps) <= 0.05 and max(steps) <= 0.10
    assert all(row.known_by == "table" for row in rows)
