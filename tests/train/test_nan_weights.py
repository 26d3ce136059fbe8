"""NaN in a checkpoint: the tensor is named, and nobody is told to lower the learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interrupted import run
from running import Command, events
from safetensors.torch import load_file, save_file
from toys import toy_config, toy_llama

from shardtune.errors import ShardtuneError

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_damaged_checkpoint_is_told_from_a_learning_rate_that_is_too_high(
    action: str, toy_data: Path, tmp_path: Path
) -> None:
    config = damaged(tmp_path, toy_data, action)
    with pytest.raises(ShardtuneError) as stopped:
        run(config, run_id="nan")
    check(tmp_path, str(stopped.value))


@pytest.mark.slow
def test_it_is_found_in_the_shard_of_another_rank(shardtune: Command, toy_data: Path, tmp_path: Path) -> None:
    done = shardtune("train", damaged(tmp_path, toy_data, "stop"), "--nproc", 2, "--run-id", "nan")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    check(tmp_path, done.stderr)


def damaged(tmp_path: Path, toy_data: Path, action: str) -> Path:
    model = toy_llama(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights[NAME][-1, 3] = float("nan")  # in the shard of the last rank
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return toy_config(tmp_path, model, toy_data, guards={"non_finite": action})


def check(tmp_path: Path, message: str) -> None:
    said = " ".join(message.split())
    assert f"'{NAME}' contains NaN or Inf" in said and "download or convert it again" in said
    assert "Lower train.learning_rate" not in said
    (event,) = events(tmp_path / "runs" / "nan", "guard")
    assert NAME in event["text"] and event["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_value_among_many_is_found(dtype: torch.dtype) -> None:
    from shardtune.train.guards.weights import is_finite

    values = torch.linspace(-2, 2, 1000)
    assert is_finite(values.to(dtype))
    for bad in (float("nan"), -float("nan")):
        values[700] = bad
        assert not is_finite(values.to(dtype))
