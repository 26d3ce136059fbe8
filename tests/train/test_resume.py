"""A run that was interrupted ends with the very bits of one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from interrupted import evaluations, final_weights, lines, run
from running import events
from toys import toy_config

from shardtune.checkpoint.store import CheckpointStore

# 11 packed rows in steps of 4: 3 steps an epoch, the last of them smaller. Log lines every 3 steps (and the first), so
# that checkpoints lie between lines.
TRAIN: dict[str, Any] = {
    "max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 4,
    "save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "warmup_ratio": 0.2, "packing": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(
        tmp_path_factory.mktemp("resume"), toy_model, toy_data,
        data={"val_split": "validation"}, lora={"lora_dropout": 0.3}, train=TRAIN,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    assert run(config, run_id="undisturbed") == 0
    return config.parent / "runs" / "undisturbed"


def assert_same(folder: Path, undisturbed: Path) -> None:
    assert lines(folder) == lines(undisturbed)
    assert evaluations(folder) == evaluations(undisturbed)
    assert final_weights(folder) == final_weights(undisturbed)


@pytest.mark.parametrize("step", [1, 3, 5])  # mid-epoch and between two log lines; an epoch's end; the second epoch
def test_a_run_stopped_on_request_goes_on_to_the_same_bits(config: Path, undisturbed: Path, step: int) -> None:
    name = f"stopped{step}"
    assert run(config, run_id=name, stop_at=step) == 143
    folder = config.parent / "runs" / name
    assert CheckpointStore(folder / "checkpoints", None).steps()[-1] == step
    assert run(config, run_id=name) == 0
    assert_same(folder, undisturbed)
    assert events(folder, "resume")[0]["step"] == step


def test_a_run_that_broke_down_several_times_ends_with_the_same_bits(config: Path, undisturbed: Path) -> None:
    """Right after a save, a step after one, and before the first."""
    for step in (1, 3, 4, 9):
        assert run(config, run_id="broken", crash_at=step) is None
    assert run(config, run_id="broken") == 0
    folder = config.parent / "runs" / "broken"
    assert_same(folder, undisturbed)
    assert [event["step"] for event in events(folder, "resume")] == [2, 4, 8]
    history = [
        json.loads((run_ / "checkpoints/step-000010/trainer.json").read_text())["log_history"]
        for run_ in (folder, undisturbed)
    ]
    for entry in history[0] + history[1]:
        for name in [name for name in entry if name.endswith(("runtime", "per_second"))]:
            del entry[name]
    assert history[0] == history[1]
