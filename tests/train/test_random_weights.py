"""A model without weights: built from config.json alone, drawn, and said so everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from interrupted import run
from running import Command, events
from toys import toy_config, toy_llama


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    folder = toy_llama(tmp_path / "model")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return folder


def test_a_run_without_weights_trains_and_says_so(
    toy_data: Path, tmp_path: Path, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy_config(
        tmp_path, bare, toy_data, model={"weights": "random"}, train={"max_steps": 2, "logging_steps": 1}
    )
    losses = {}
    for name in ("one", "again"):
        assert run(config, run_id=name) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.count("warning RANDOM weights (model.weights: random)") == 1
        assert "final (trained on RANDOM weights: useless)" in said
        (told,) = events(tmp_path / "runs" / name, "warning")
        assert told["text"].startswith("RANDOM weights")
        (weights,) = events(tmp_path / "runs" / name, "weights")
        assert weights["way"] == "random" and weights["bytes_read"] == 0
        losses[name] = [event["loss"] for event in events(tmp_path / "runs" / name, "step")]
    assert losses["one"] == losses["again"] and len(losses["one"]) == 2


@pytest.mark.slow
def test_each_rank_draws_its_own_rows(shardtune: Command, toy_data: Path, tmp_path: Path, bare: Path) -> None:
    config = toy_config(tmp_path, bare, toy_data, model={"weights": "random"}, train={"max_steps": 2})
    assert run(config, run_id="one") == 0
    result = shardtune("train", config, "--run-id", "two", "--nproc", 2, "-o", "train.per_device_train_batch_size=1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("warning   RANDOM weights") == 1
    one, two = (events(tmp_path / "runs" / name, "weights")[0]["local_bytes"] for name in ("one", "two"))
    assert two < 0.7 * one


def test_without_being_asked_for_a_missing_checkpoint_stays_an_error(
    shardtune: Command, toy_data: Path, tmp_path: Path, bare: Path
) -> None:
    result = shardtune("train", toy_config(tmp_path, bare, toy_data))
    assert result.returncode == 2 and "no safetensors weights" in result.stderr


def test_float8_codes_are_drawn_as_codes(toy_data: Path, tmp_path: Path, bare: Path) -> None:
    config = toy_config(tmp_path, bare, toy_data, model={"weights": "random"}, train={"max_steps": 1})
    held = {}
    for precision in ("bf16", "fp8"):
        assert run(config, f"model.base_precision={precision}", run_id=precision) == 0
        held[precision] = events(tmp_path / "runs" / precision, "weights")[0]["local_bytes"]
    # Two layers of 32 wide, their linear layers a byte and a scale per row in place of four bytes.
    saved = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) * 3 - 2 * (32 + 32 + 16 + 16 + 64 + 64 + 32) * 4
    assert held["bf16"] - held["fp8"] == saved
