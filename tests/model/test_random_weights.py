"""A model without weights: built from config.json alone, drawn, and said so everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command, events
from toys import toy_config, toy_llama


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    folder = toy_llama(tmp_path / "model")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return folder


def test_a_run_without_weights_trains_and_says_so(
    shardtune: Command, toy_data: Path, tmp_path: Path, bare: Path
) -> None:
    config = toy_config(
        tmp_path, bare, toy_data, model={"weights": "random"}, train={"max_steps": 2, "logging_steps": 1}
    )
    for name, words in {
        "one": [],
        "again": [],
        "sharded": ["--nproc", 2, "-o", "train.per_device_train_batch_size=1"],
    }.items():
        result = shardtune("train", config, "--run-id", name, *words)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.count("warning RANDOM weights (model.weights: random)") == 1
        assert "weights   RANDOM" in result.stdout and "final (of RANDOM weights: good for nothing)" in result.stdout
        (told,) = events(tmp_path / "runs" / name, "warning")
        assert told["text"].startswith("RANDOM weights")
    one, again, sharded = (events(tmp_path / "runs" / name, "weights")[0] for name in ("one", "again", "sharded"))
    assert one["way"] == "random" and one["bytes_read"] == 0
    assert sharded["local_bytes"] < 0.7 * one["local_bytes"] == 0.7 * again["local_bytes"]
    losses = [[event["loss"] for event in events(tmp_path / "runs" / name, "step")] for name in ("one", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_without_being_asked_for_a_missing_checkpoint_stays_an_error(
    shardtune: Command, toy_data: Path, tmp_path: Path, bare: Path
) -> None:
    result = shardtune("train", toy_config(tmp_path, bare, toy_data))
    assert result.returncode == 2 and "no safetensors weights" in result.stderr


def test_float8_codes_are_drawn_as_codes(shardtune: Command, toy_data: Path, tmp_path: Path, bare: Path) -> None:
    config = toy_config(tmp_path, bare, toy_data, model={"weights": "random"}, train={"max_steps": 1})
    held = {}
    for precision in ("bf16", "fp8"):
        result = shardtune("train", config, "--run-id", precision, "-o", f"model.base_precision={precision}")
        assert result.returncode == 0, result.stdout + result.stderr
        held[precision] = events(tmp_path / "runs" / precision, "weights")[0]["local_bytes"]
    # Two layers of 32 wide, their linear layers a byte and a scale per row in place of four bytes.
    saved = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) * 3 - 2 * (32 + 32 + 16 + 16 + 64 + 64 + 32) * 4
    assert held["bf16"] - held["fp8"] == saved
