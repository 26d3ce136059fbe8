"""What the benchmark of overlapping gathers counts and draws, and that it ends what it starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent.parent / "benchmarks" / "overlap.py"
STEP = {
    "seconds": 10.0,
    "times": [
        ("gather", -1, "forward", 0.0, 1.0), ("wait", -1, "forward", 0.0, 1.0), ("compute", -1, "forward", 1.0, 5.0),
        ("gather", 0, "forward", 1.0, 2.0), ("wait", 0, "forward", 1.0, 2.0),
        ("gather", 1, "forward", 2.0, 4.0), ("compute", 0, "forward", 3.0, 5.0), ("wait", 1, "forward", 5.0, 5.5),
        ("compute", 1, "forward", 5.5, 6.0), ("compute", 1, "backward", 6.0, 8.0), ("compute", 0, "backward", 8.0, 10.0),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def overlap() -> Any:
    spec = importlib.util.spec_from_file_location("overlap", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_time_that_two_spans_share_is_counted_once(overlap: Any) -> None:
    assert overlap.total([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0


def test_a_gather_is_hidden_while_some_layer_computes(overlap: Any) -> None:
    assert overlap.hidden(STEP["times"]) == pytest.approx(1 / 3)  # one of three seconds; the root computes around all
    assert overlap.waited(STEP) == pytest.approx(0.25)


def test_a_timeline_shows_each_layer_where_it_was(overlap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "COLUMNS", 10)
    assert overlap.timeline(STEP, 2) == ["  layer 0  | - ==   ##|", "  layer 1  |  -- =##  |"]


def tiny(environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    small = ("--layers", "4", "--hidden", "32", "--repeats", "1")
    command = [sys.executable, str(PROGRAM), *small, *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_benchmark_counts_gathers_compares_losses_and_writes_a_trace(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = tiny(environment, "--trace", str(tmp_path / "trace.json"), "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [now["gathers"] for now in found.values()] == [9, 9, 9, 5, 5, 5]
    assert done.stdout.count("the same in all") == 2
    assert done.stdout.count("  layer 3  |") == 6
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"reshard True, 1 ahead, rank 0", "reshard False, 2 ahead, rank 1"} <= names and len(names) == 12
    gathers = [event for event in events if event["ph"] == "X" and event["name"] == "gather layer 3 (backward)"]
    assert len(gathers) == 6  # three settings let layers go, on two ranks


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_benchmark_with_its_words(environment: dict[str, str]) -> None:
    done = tiny(environment, "--hidden", "-4")
    assert done.returncode == 1
    assert "failed with exit code 1:" in done.stderr and "Traceback" in done.stderr
