"""A restart that is refused costs the restart, never the run: real ranks, real kills, real data that changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Command
from toys import toy_config, toy_llama, toy_rows

from shardtune.checkpoint.store import CheckpointStore


def ranks_of(launcher: int) -> list[int]:
    """Processes that the launcher has started itself, and that live."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children]


def start(config: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", str(config), "--nproc", "2", "--run-id", "r"],
        env={**environment, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def change_the_data(data: Path, model: Path) -> None:
    with (data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "w01 w02", "answer": "w02 w01", "text": "w01"}) + "\n")


def lose_the_model(data: Path, model: Path) -> None:
    model.rename(model.with_name("unmounted"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [change_the_data, lose_the_model])
def test_a_restart_that_is_refused_leaves_the_run_and_its_checkpoints(
    tmp_path: Path, environment: dict[str, str], shardtune: Command, fault: Callable[[Path, Path], None]
) -> None:
    model, data = toy_llama(tmp_path / "model"), toy_rows(tmp_path / "data")
    train = {"max_steps": 100_000, "save_strategy": "steps", "save_steps": 5, "logging_steps": 1000}
    config = toy_config(tmp_path, model, data, train=train, parallel={"max_restarts": 1})
    store = CheckpointStore(tmp_path / "runs" / "r" / "checkpoints", keep=None)
    process = start(config, environment)
    try:
        deadline = time.monotonic() + 120
        while not store.steps() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.steps(), process.communicate()
        fault(data, model)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2, said
    assert "restarting (1 of at most 1" in said and f"The run is unchanged: {tmp_path}/runs/r" in said
    step, damaged = store.newest_intact()
    assert step is not None and not damaged
    if fault is lose_the_model:
        model.with_name("unmounted").rename(model)
        goes_on = shardtune("train", config, "--run-id", "r", "--nproc", 2, "-o", f"train.max_steps={step + 1}")
        assert goes_on.returncode == 0, goes_on.stderr
        assert "resume" in goes_on.stdout and (tmp_path / "runs" / "r" / "final").is_dir()


def test_a_first_start_that_is_refused_frees_its_name(
    tmp_path: Path, shardtune: Command, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data, lora={"target_modules": ["no_such"]})
    refused = shardtune("train", config, "--run-id", "r")
    assert refused.returncode == 2 and "no_such" in refused.stderr
    assert list((tmp_path / "runs").iterdir()) == []
