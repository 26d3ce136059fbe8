"""What may `eval-loss --adapter` be called? All that other commands take for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.cli.eval_loss import _adapter
from shardtune.errors import UserInputError
from shardtune.launch.process_role import Node, Worker


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("20260101-101010-abcd", "20260202-101010-abcd"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    return tmp_path / "runs"


@pytest.mark.parametrize("given", ["20260101-101010-abcd", "202601"])
def test_an_id_or_its_beginning_is_the_runs_folder(runs: Path, given: str) -> None:
    assert _adapter(Path(given), runs, Node()) == runs / "20260101-101010-abcd"


def test_what_names_several_runs_or_none_is_refused_with_those_there_are(runs: Path) -> None:
    with pytest.raises(UserInputError, match=r"--adapter: '2026' does not exist\. 2 runs start with '2026'"):
        _adapter(Path("2026"), runs, Node())
    with pytest.raises(UserInputError, match=r"There is no run '2027.*20260202-101010-abcd"):
        _adapter(Path("2027"), runs, Node())


def test_an_adapter_within_a_run_is_named_as_for_generate(runs: Path) -> None:
    run = runs / "20260101-101010-abcd"
    assert _adapter(Path("202601/final"), runs, Node()) == run / "final"
    assert _adapter(Path("202601/step-000004"), runs, Node()) == run / "checkpoints" / "step-000004"


def test_ranks_that_do_not_read_the_adapter_need_not_have_the_run(runs: Path) -> None:
    assert _adapter(Path("202601"), runs / "elsewhere", Worker(1, 2, 1)) == Path("202601")
