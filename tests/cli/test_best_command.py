"""`shardtune best` says which checkpoint and why, writes what it says it writes, and takes no torch to do it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import Command

from shardtune.checkpoint.store import CheckpointStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two evaluations, the better of which is of step 10; as an older version wrote them, without groups."""
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    store = CheckpointStore(run / "checkpoints", keep=None)
    with (run / "events-rank0.jsonl").open("w") as file:
        for step, loss in ((10, 1.5), (20, 1.7)):
            event = {
                "v": 2,
                "time": step,
                "rank": 0,
                "event": "eval",
                "step": step,
                "loss": loss,
                "token_accuracy": loss,
            }
            file.write(json.dumps(event) + "\n")
            store.write(
                step,
                lambda folder: (folder / "adapter_model.safetensors").write_text("x") and None,
                {"eval_loss": loss},
            )
    return run


def test_it_prints_the_reasons_and_moves_the_pointer(shardtune: Command, run: Path) -> None:
    result = shardtune("best", run, "--metric", "token_accuracy")
    assert result.returncode == 0, result.stderr
    assert f"step 20, token accuracy 1.7000: {run}/checkpoints/step-000020" in result.stdout
    assert "not recorded" in result.stdout
    assert "names step 20 (was step 10)" in result.stdout.replace("\n", " ")
    chosen = (
        "Best: step 20 was chosen by `shardtune best`: token_accuracy 1.7000. "
        "The lowest evaluation loss is that of step 10 (1.5000)."
    )
    assert chosen in shardtune("checkpoints", run).stdout
    pointer = run / "checkpoints" / "best"
    assert pointer.read_text() == "step-000020\n"
    assert shardtune("best", run, "--dry-run").returncode == 0 and pointer.read_text() == "step-000020\n"
    found = json.loads(shardtune("best", run, "--json").stdout)
    assert (found["best"]["step"], found["path"], found["ties"]) == (10, f"{run}/checkpoints/step-000010", [])
    assert pointer.read_text() == "step-000010\n"
    assert "was chosen" not in shardtune("checkpoints", run).stdout


def test_an_earliest_tie_that_cannot_be_judged_is_said(shardtune: Command, run: Path) -> None:
    result = shardtune("best", run, "--metric", "token_accuracy", "--earliest-tie")
    assert "--earliest-tie has no effect: the noise is not known." in result.stdout
    assert "--earliest-tie" not in shardtune("best", run).stdout


def test_what_is_not_a_run_or_not_a_metric_is_said_in_three_lines(shardtune: Command, run: Path) -> None:
    for arguments, text in (((run, "--metric", "entropy"), "not ranked"), (("nothing",), "There is no run")):
        result = shardtune("best", *arguments)
        assert result.returncode == 2 and text in result.stderr and "Traceback" not in result.stderr


def test_without_intact_weights_it_fails_after_showing_the_curve(shardtune: Command, run: Path) -> None:
    for step in (10, 20):
        (run / "checkpoints" / f"step-0000{step}" / "adapter_model.safetensors").write_text("y")
    result = shardtune("best", run, "--to-final")
    assert result.returncode == 1 and "none: no evaluated step has intact weights" in result.stdout
    assert "1.5000" in result.stdout


def test_it_needs_no_torch(environment: dict[str, str], run: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['shardtune', 'best', sys.argv[1]];"
        "from shardtune.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code, str(run)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
