"""SIGTERM at any moment of a run: it ends with the code for "start me again", and what was learnt is there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Command, events
from toys import big_llama, toy_config, toy_rows, toy_tokenizer

from shardtune.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slow


def stop_when(
    config: Path, environment: dict[str, str], moment: Callable[[], bool], number: signal.Signals = signal.SIGTERM
) -> tuple[int, str, str]:
    """Start a run, send a signal at the moment, return its exit code and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", str(config), "--run-id", "r"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not moment() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def has(run: Path, event: str) -> bool:
    log = run / "events-rank0.jsonl"
    return log.exists() and f'"event": "{event}"' in log.read_text()


def test_in_an_evaluation_that_would_outlast_the_grace(
    tmp_path: Path, toy_model: Path, environment: dict[str, str]
) -> None:
    data = toy_rows(tmp_path / "data", val_rows=20000)
    config = toy_config(
        tmp_path, toy_model, data,
        data={"val_split": "validation"},
        train={"max_steps": 5, "eval_steps": 1, "per_device_eval_batch_size": 1, "save_strategy": "steps", "save_steps": 100},
    )  # fmt: skip
    run = tmp_path / "runs" / "r"
    code, out, err = stop_when(config, environment, lambda: has(run, "step"))
    assert code == 75, err
    assert "Stopped on request after step 1 of 5" in out
    assert events(run, "eval") == [] and not (run / "final").exists()
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000001"]


def test_an_evaluation_that_was_cut_short_is_made_up_for_and_counts_for_its_checkpoint(
    tmp_path: Path, toy_model: Path, environment: dict[str, str], shardtune: Command
) -> None:
    data = toy_rows(tmp_path / "data", val_rows=2000)
    config = toy_config(
        tmp_path, toy_model, data,
        data={"val_split": "validation"},
        train={"max_steps": 2, "eval_steps": 1, "per_device_eval_batch_size": 1, "save_strategy": "steps", "save_steps": 1},
    )  # fmt: skip
    run = tmp_path / "runs" / "r"
    code, _, err = stop_when(config, environment, lambda: has(run, "step"))
    assert code == 75, err
    store = CheckpointStore(run / "checkpoints", keep=None)
    assert (store.steps(), store.best()) == ([1], None)
    result = shardtune("train", config, "--run-id", "r")
    assert result.returncode == 0, result.stderr
    measured = {event["step"]: event["loss"] for event in events(run, "eval")}
    assert {step: store.manifest(step).eval_loss for step in store.steps()} == measured
    assert sorted(measured) == [1, 2]


def test_while_weights_are_read(tmp_path: Path, toy_data: Path, environment: dict[str, str]) -> None:
    big_llama(tmp_path / "model", 1.0)
    toy_tokenizer(tmp_path / "model")
    config = toy_config(tmp_path, tmp_path / "model", toy_data)
    run = tmp_path / "runs" / "r"
    code, out, err = stop_when(config, environment, lambda: has(run, "plan"))
    assert code == 75 and "Traceback" not in err, err
    assert not has(run, "weights") and not has(run, "step")
    assert "Stopped on request before the first step" in out


def test_before_the_first_step_there_is_nothing_to_save(
    tmp_path: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data)
    run = tmp_path / "runs" / "r"
    code, out, err = stop_when(config, environment, lambda: has(run, "run_start"), signal.SIGUSR1)
    assert code == 75, err
    assert "Stopped on request before the first step" in out and "Traceback" not in err


def test_while_the_libraries_are_imported(
    tmp_path: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data)
    run = tmp_path / "runs" / "r"
    code, _, err = stop_when(config, environment, lambda: run.exists())
    assert code == 75 and "Traceback" not in err, err


def test_a_grace_that_is_too_short_is_told_while_there_is_time_to_change_it(
    tmp_path: Path, toy_model: Path, toy_data: Path, shardtune: Command
) -> None:
    train = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "grace_seconds": 1e-4}
    done = shardtune("train", toy_config(tmp_path, toy_model, toy_data, train=train), "--run-id", "r")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Give the job a longer grace period") == 1
    (warning,) = [event for event in events(tmp_path / "runs" / "r", "warning") if event["about"] == "grace"]
    assert "train.grace_seconds" in warning["text"]
