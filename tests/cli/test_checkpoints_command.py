from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import Command

from shardtune.checkpoint.store import CheckpointStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=None)
    for step, loss in ((100, 2.5), (200, 1.25), (300, None)):
        about = {"eval_loss": loss, "time": time.time() - 7200, "world_size": 3}
        store.write(
            step, lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 2000) and None, about
        )
    return tmp_path / "run"


def test_it_lists_step_size_loss_age_and_marks(shardtune: Command, run: Path) -> None:
    result = shardtune("checkpoints", run)
    assert result.returncode == 0, result.stderr
    rows = [line.split("│") for line in result.stdout.splitlines() if "intact" in line]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["100", "1.95 KiB", "2.5000", "2 h", "intact"],
        ["200", "1.95 KiB", "1.2500", "2 h", "best", "intact"],
        ["300", "1.95 KiB", "2 h", "latest", "intact"],
    ]


def test_damage_is_named_and_only_verify_reads_every_byte(shardtune: Command, run: Path) -> None:
    file = run / "checkpoints" / "step-000200" / "adapter_model.safetensors"
    file.write_bytes(b"x" * 1999 + b"y")
    assert shardtune("checkpoints", run).returncode == 0
    result = shardtune("checkpoints", run, "--verify", "--json")
    assert result.returncode == 1
    rows = {row["step"]: row for row in json.loads(result.stdout)}
    assert [row["intact"] for row in rows.values()] == [True, False, True]
    assert rows[200]["damages"] == ["adapter_model.safetensors: changed (its checksum does not match)"]
    file.write_bytes(b"x" * 10)
    assert "truncated" in shardtune("checkpoints", run).stdout


def test_a_folder_that_is_no_run_is_an_answer_not_a_traceback(shardtune: Command, tmp_path: Path) -> None:
    result = shardtune("checkpoints", tmp_path)
    assert result.returncode == 2 and f"There is no run '{tmp_path}'" in result.stderr


def test_a_run_is_found_by_its_id_or_the_beginning_of_it(shardtune: Command, run: Path) -> None:
    (run / "run.json").write_text("{}")
    run.rename(run.parent / "20260101-101010-abcd")
    for given in ("20260101-101010-abcd", "202601"):
        result = shardtune("checkpoints", given, "--json", "--runs-dir", run.parent)
        assert [row["step"] for row in json.loads(result.stdout)] == [100, 200, 300], result.stderr


def test_an_id_that_is_unknown_or_not_the_only_one_is_answered_with_those_there_are(
    shardtune: Command, tmp_path: Path
) -> None:
    for name in ("20260101-101010-abcd", "20260102-101010-ef01"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    unknown = shardtune("checkpoints", "20260101-101010-abcx", "--runs-dir", tmp_path)
    assert unknown.returncode == 2 and "Did you mean 20260101-101010-abcd" in unknown.stderr
    several = shardtune("checkpoints", "2026", "--runs-dir", tmp_path)
    assert several.returncode == 2
    assert "2 runs start with '2026': 20260102-101010-ef01, 20260101-101010-abcd." in several.stderr


def test_several_runs_have_a_table_each(shardtune: Command, run: Path) -> None:
    other = run.parent / "other"
    shutil.copytree(run, other)
    result = shardtune("checkpoints", run, other)
    assert result.returncode == 0, result.stderr
    assert f"{run}/checkpoints" in result.stdout and f"{other}/checkpoints" in result.stdout
    assert result.stdout.count("latest") == 2
    assert len(json.loads(shardtune("checkpoints", run, other, "--json").stdout)) == 6


def test_it_needs_no_torch(environment: dict[str, str], run: Path) -> None:
    program = (
        "import sys; sys.argv = ['shardtune', 'checkpoints', sys.argv[1], '--verify']\n"
        "from shardtune.cli.main import main\n"
        "try: main()\n"
        "finally: print('loaded:', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(run)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "loaded: []"), result.stderr


def test_a_run_without_checkpoints_says_which_setting_is_the_cause(shardtune: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    assert shardtune("checkpoints", run).stdout == "No checkpoints yet.\n"
    (run / "config.yaml").write_text('train:\n  save_strategy: "no"\n')
    result = shardtune("checkpoints", run).stdout
    assert result == f"This run saves no checkpoints (train.save_strategy: no); its result will be {run}/final.\n"
    (run / "final").mkdir()
    (run / "final" / "adapter_model.safetensors").write_text("x")
    (run / "config.yaml").write_text("train:\n  save_strategy: steps\n  save_steps: 200\n")
    result = shardtune("checkpoints", run).stdout
    assert result.startswith("This run saved no checkpoints (train.save_strategy: steps, train.save_steps: 200); its ")


def test_links_and_files_with_the_name_of_a_checkpoint_are_named(shardtune: Command, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000004").symlink_to(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-000005").write_text("a file")
    result = shardtune("checkpoints", tmp_path / "run")
    assert result.returncode == 0 and "No checkpoints yet." in result.stdout
    for name in ("step-000004", "step-000005"):
        assert f"{name} is a link or a file" in result.stderr
