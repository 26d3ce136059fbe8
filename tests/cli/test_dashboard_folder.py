"""Which folder `shardtune dashboard` shows when none is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command

from shardtune.cli.dashboard import default_folder


def make(run: Path) -> None:
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")


def test_the_only_folder_that_holds_runs_is_shown_where_there_is_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shardtune: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "outputs" / "a")
    assert default_folder() == Path("outputs")
    make(tmp_path / "more" / "b")
    refused = shardtune("dashboard")
    assert refused.returncode == 2 and "several others here contain runs: more, outputs" in refused.stderr
    make(tmp_path / "runs" / "c")
    assert default_folder() == Path("runs")
