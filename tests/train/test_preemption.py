"""SIGTERM at any moment of a run: it ends with the code for "start me again", and what was learnt is there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from interrupted import final_weights, lines
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
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


HELD_SAVE = Path(__file__).with_name("held_save.py")


@contextmanager
def in_a_save(
    config: Path, environment: dict[str, str], run_id: str, step: int
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that is in the middle of the save of `step`, and the file that lets the save go on."""
    until = config.parent / f"{run_id}.go-on"
    process = subprocess.Popen(
        [sys.executable, str(HELD_SAVE), "train", str(config), "--run-id", run_id],
        env={**environment, "HELD_STEP": str(step), "HELD_UNTIL": str(until)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not until.with_name(f"{until.name}.waiting").exists():
            assert process.poll() is None and time.monotonic() < deadline, "the save never began"
            time.sleep(0.02)
        yield process, until
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def saving(
    tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path, shared_shardtune: Command
) -> Path:
    """A config with saves and dropout; beside it, the run `undisturbed`."""
    train = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
    folder = tmp_path_factory.mktemp("saving")
    config = toy_config(folder, toy_model, toy_data, train=train, lora={"lora_dropout": 0.3})
    done = shared_shardtune("train", config, "--run-id", "undisturbed", "--resume", "never")
    assert done.returncode == 0, done.stderr
    return config


def assert_goes_on_to_the_same_bits(saving: Path, run_id: str, shardtune: Command) -> None:
    result = shardtune("train", saving, "--run-id", run_id)
    assert result.returncode == 0, result.stderr
    run, undisturbed = (saving.parent / "runs" / name for name in (run_id, "undisturbed"))
    assert lines(run) == lines(undisturbed) and final_weights(run) == final_weights(undisturbed)
    store = CheckpointStore(run / "checkpoints", keep=None)
    assert all(store.verify(step) == [] for step in store.steps())
    assert not list((run / "checkpoints").glob(".staging-*"))


def test_in_the_middle_of_a_save_that_save_is_finished_and_the_step_saved_too(
    saving: Path, environment: dict[str, str], shardtune: Command
) -> None:
    run = saving.parent / "runs" / "asked"
    store = CheckpointStore(run / "checkpoints", keep=None)
    with in_a_save(saving, environment, "asked", 4) as (process, until):
        assert store.steps() == [2]
        process.send_signal(signal.SIGTERM)
        time.sleep(1)  # it is asked while the save is held, and must not have left
        assert process.poll() is None
        until.touch()
        out, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    assert "Stopped on request after step" in out
    (end,) = events(run, "run_end")
    # Steps go on beside a save; the one after the next save may see the signal.
    assert end["status"] == "stopped" and store.steps() == sorted({*range(2, end["step"], 2), end["step"]})
    assert [store.verify(step) for step in store.steps()] == [[]] * len(store.steps())
    assert_goes_on_to_the_same_bits(saving, "asked", shardtune)


def test_a_second_signal_in_the_middle_of_a_save_leaves_at_once_and_the_save_before_is_sound(
    saving: Path, environment: dict[str, str], shardtune: Command
) -> None:
    run = saving.parent / "runs" / "asked-twice"
    store = CheckpointStore(run / "checkpoints", keep=None)
    with in_a_save(saving, environment, "asked-twice", 4) as (process, _):
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)  # longer than one press that was handed on twice
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 143, err
    assert store.steps() == [2] and store.verify(2) == []
    assert list((run / "checkpoints").glob(".staging-step-000004-*"))  # what a crash leaves, and the next save removes
    assert_goes_on_to_the_same_bits(saving, "asked-twice", shardtune)


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
    assert "Stopped on request after step 1 of 5. The same command resumes from there." in out
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
    assert "Stopped before the first step" in out


def test_before_the_first_step_there_is_nothing_to_save(
    tmp_path: Path, toy_model: Path, toy_data: Path, environment: dict[str, str]
) -> None:
    config = toy_config(tmp_path, toy_model, toy_data)
    run = tmp_path / "runs" / "r"
    code, out, err = stop_when(config, environment, lambda: has(run, "run_start"), signal.SIGUSR1)
    assert code == 75, err
    assert "Stopped before the first step" in out and "Traceback" not in err


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
