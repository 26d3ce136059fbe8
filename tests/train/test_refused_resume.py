"""A command that wants to go on with a run and is refused leaves the run as it was, for whoever looks at it later."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupted import run as train_here
from running import Command
from toys import toy_config, toy_rows

from shardtune.checkpoint.snapshot import Snapshot
from shardtune.errors import UserInputError
from shardtune.train import resume


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.fixture
def config(tmp_path: Path, toy_model: Path) -> Path:
    train = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    return toy_config(tmp_path, toy_model, toy_rows(tmp_path / "data"), train=train)


@pytest.mark.slow
def test_a_refused_resume_changes_no_file_of_the_run(tmp_path: Path, shardtune: Command, config: Path) -> None:
    run = tmp_path / "runs" / "r"
    first = shardtune("train", config, "--run-id", "r", "--nproc", 2)
    assert first.returncode == 0, first.stderr
    before = contents(run)
    again = ("train", config, "--run-id", "r", "--nproc", 2, "--resume", "latest")
    refused = shardtune(*again, "-o", "train.seed=3")
    assert refused.returncode == 2 and f"The run is unchanged: {run}" in refused.stderr
    assert contents(run) == before

    goes_on = shardtune(*again, "-o", "train.max_steps=3")
    assert goes_on.returncode == 0, goes_on.stderr
    starts = [line for line in (run / "events-rank0.jsonl").read_text().splitlines() if '"event": "run_start"' in line]
    assert len(starts) == 2, "an accepted one is written down, with all that came before the resume"


@pytest.mark.slow
def test_a_start_that_fails_before_it_goes_on_is_written_down(tmp_path: Path, shardtune: Command, config: Path) -> None:
    run = tmp_path / "runs" / "r"
    assert shardtune("train", config, "--run-id", "r").returncode == 0
    for adapter in run.glob("checkpoints/step-*/adapter_model.safetensors"):
        adapter.write_bytes(b"damaged")
    failed = shardtune("train", config, "--run-id", "r", "--resume", "latest", "-o", "train.max_steps=3")
    assert failed.returncode == 1 and "damaged" in failed.stderr
    last = (run / "events-rank0.jsonl").read_text().splitlines()[-1]
    assert '"event": "run_failed"' in last and "damaged" in last


def test_a_checkpoint_of_an_older_version_is_refused_and_kept(
    toy_model: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data, train={"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    )
    assert train_here(config, run_id="r", crash_at=2) is None
    read = resume.read_snapshot

    def older(folder: Path) -> Snapshot:
        snapshot = read(folder)
        del snapshot.trainer["metrics"]
        return snapshot

    monkeypatch.setattr(resume, "read_snapshot", older)
    with pytest.raises(UserInputError, match="written by an older version of shardtune"):
        train_here(config, run_id="r")
    monkeypatch.undo()
    assert train_here(config, run_id="r") == 0
