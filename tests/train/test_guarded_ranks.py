"""Guards with two ranks: who it is that is in trouble, told once, and acted on by both together."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import events
from toys import toy_config

FAULTY = Path(__file__).parent / "faulty_train.py"


def faulty(environment: dict[str, str], fault: str, config: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = [word for override in overrides for word in ("-o", override)]
    paths = f"{environment['PYTHONPATH']}:{FAULTY.parent}:{FAULTY.parent.parent}"
    return subprocess.run(
        [sys.executable, str(FAULTY), "train", str(config), "--run-id", "r", "--nproc", "2", *words],
        env={**environment, "FAULT": fault, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path) -> Path:
    train = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "packing": False}
    return toy_config(tmp_path, toy_model, toy_data, train=train)


@pytest.mark.slow
def test_a_loss_that_is_no_number_on_one_rank_stops_both_and_names_its_rows(
    environment: dict[str, str], config: Path
) -> None:
    ended = faulty(environment, "nan:1:3", config)
    assert ended.returncode == 1
    assert ended.stderr.count("error:") == 1 and "Traceback" not in ended.stderr
    order = torch.randperm(50, generator=torch.Generator().manual_seed(42)).tolist()
    # step 3 of 8 rows: two micro-batches of 2 ranks × 2 rows; rank 1 has the last two rows of the second
    rows = [f"train:{row}" for row in order[16 + 6 : 16 + 8]]
    assert "Loss is not finite at step 3: NaN on rank 1." in ended.stderr
    assert f"Rank 1. Rows: {', '.join(rows)}." in " ".join(ended.stderr.split())
    run = config.parent / "runs" / "r"
    (event,) = events(run, "guard")
    assert (event["action"], event["ranks"], event["rows"]) == ("stop", [1], rows)
    assert events(run, "guard", rank=1) == [] and not (run / "final").exists()
    assert [events(run, "run_failed", rank)[-1]["exit_code"] for rank in (0, 1)] == [1, 1]


@pytest.mark.slow
def test_both_ranks_skip_the_step_that_one_cannot_use_and_going_back_together_ends_the_same(
    environment: dict[str, str], config: Path
) -> None:
    ended = faulty(environment, "nan:1:5", config, "guards.non_finite=skip-step")
    assert ended.returncode == 0, ended.stderr
    run = config.parent / "runs" / "r"
    assert [(e["action"], e["step"]) for e in events(run, "guard")] == [("skip-step", 5)]
    for rank in (0, 1):
        assert [e["step"] for e in events(run, "step", rank)] == [1, 2, 3, 4, 6]
        assert all(isinstance(e["loss"], float) for e in events(run, "step", rank))
    assert "step skipped (1 so far)" in " ".join(ended.stdout.lower().split())
    weights = (run / "final" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(run)

    back = ("guards.non_finite=rollback", "train.save_strategy=steps", "train.save_steps=2")
    ended = faulty(environment, "nan:1:5", config, *back)
    assert ended.returncode == 0, ended.stderr
    (event,) = events(run, "guard")
    assert (event["action"], event["step"], event["to_step"], event["ranks"]) == ("rollback", 5, 4, [1])
    assert [e["step"] for e in events(run, "step", rank=1)] == [1, 2, 3, 4, 6]
    assert (run / "final" / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_a_slow_rank_is_named_with_its_host(environment: dict[str, str], config: Path) -> None:
    more = ("train.debug_freq=2", "train.max_steps=8", "train.gradient_accumulation_steps=1")
    ended = faulty(environment, "slow:1:1", config, *more)
    assert ended.returncode == 0, ended.stderr
    (event,) = events(config.parent / "runs" / "r", "guard")
    assert (event["guard"], event["action"], event["ranks"], event["step"]) == ("straggler", "warn", [1], 6)
    assert event["value"] > 1.3 and "Rank 1 on " in event["text"]


@pytest.mark.slow
def test_a_rank_that_waits_for_data_is_named(environment: dict[str, str], config: Path) -> None:
    ended = faulty(environment, "starve:1:1", config, "train.debug_freq=3")
    assert ended.returncode == 0, ended.stderr
    told = events(config.parent / "runs" / "r", "guard")
    assert told and {(event["guard"], *event["ranks"]) for event in told} == {("data_starvation", 1)}
    assert 0.3 < told[0]["value"] <= 1.0


@pytest.mark.slow
def test_running_out_of_memory_on_one_rank_ends_both_with_its_message_and_is_not_tried_again(
    environment: dict[str, str], config: Path
) -> None:
    ended = faulty(environment, "oom:1:2", config, "parallel.max_restarts=2")
    assert ended.returncode == 71
    assert ended.stderr.count("error:") == 1 and "restarting" not in ended.stderr
    assert "Rank 1 ran out of GPU memory in the forward pass of step 2: failed to allocate 2.5 GiB" in ended.stderr
    assert "train.per_device_train_batch_size: 1 frees about" in " ".join(ended.stderr.split())
    run = config.parent / "runs" / "r"
    (event,) = events(run, "out_of_memory", rank=1)
    assert (event["phase"], event["step"], event["wanted"]) == ("forward", 2, int(2.5 * 2**30))
    assert events(run, "out_of_memory") == []
    assert events(run, "run_failed", rank=1)[0]["exit_code"] == 71
