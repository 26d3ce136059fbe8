"""What a run says of its machines: one look for each node, gathered to rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from running import events

from shardtune.observe.events import EventLog
from shardtune.observe.hardware import describe_hardware
from shardtune.terminal import VERBOSE_VARIABLE
from shardtune.train.run_files import report_hardware


def context(folder: Path, rank: int, local_rank: int, gather: Callable[[Any], list[Any]] = lambda mine: [mine]) -> Any:
    processes = SimpleNamespace(rank=rank, local_rank=local_rank, is_main=rank == 0, gather=gather)
    console = Console(file=StringIO(), width=120, quiet=rank != 0)
    return SimpleNamespace(processes=processes, console=console, folder=folder, events=EventLog(folder, rank))


def test_one_process_keeps_its_own_machine_and_tells_it_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = context(tmp_path, 0, 0)
    report_hardware(alone, workers=0)
    (event,) = events(tmp_path, "hardware")
    kept = json.loads((tmp_path / "environment.json").read_text())
    assert kept["host"] == event["host"] and kept["packages"] == event["packages"]
    assert alone.console.file.getvalue() == ""  # the machine is as it should be: nothing to say before the first step
    monkeypatch.setenv(VERBOSE_VARIABLE, "1")
    report_hardware(alone, workers=0)
    said = alone.console.file.getvalue()
    assert said.startswith(f"host      {kept['host']}, ") and "software  Python" in said
    assert len(said.splitlines()) <= 6


def test_rank_0_tells_how_another_node_differs(tmp_path: Path) -> None:
    here = describe_hardware(tmp_path)
    there = {**here, "host": "other", "python": "3.12.1"}

    def gather(mine: Any) -> list[Any]:
        assert mine["host"] == here["host"]
        return [mine, None, there, None]  # two nodes of two ranks

    main = context(tmp_path, 0, 0, gather)
    report_hardware(main, workers=0)
    said = main.console.file.getvalue()
    assert f"differs   node 1 (other): Python 3.12.1 instead of {here['python']}\n" in said
    assert said.count("differs") == 1


def test_a_second_rank_of_a_node_looks_at_nothing(tmp_path: Path) -> None:
    gathered: list[Any] = []
    report_hardware(context(tmp_path, 1, 1, lambda mine: gathered.append(mine) or []), workers=0)
    assert gathered == [None]
    assert events(tmp_path, "hardware", rank=1) == [] and not (tmp_path / "environment.json").exists()
