"""How a run ends: with the best checkpoint that was kept, or with an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from running import Command, events
from toys import toy_config


def test_the_best_is_the_best_of_what_was_saved(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    """Evaluated every step, saved every third, and the loss rises at the end: the best evaluation was never saved."""
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={
            "max_steps": 9, "eval_steps": 1, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1,
            "load_best_model_at_end": True, "learning_rate": 0.5, "lr_scheduler_type": "constant",
        },
    )  # fmt: skip
    result = shardtune("train", config, "--run-id", "one")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "one"
    losses = {event["step"]: event["loss"] for event in events(run, "eval")}
    best_saved = min((3, 6, 9), key=losses.__getitem__)
    assert min(losses, key=losses.__getitem__) != best_saved, "the case this test is about did not arise"
    assert events(run, "run_end")[0]["eval_loss"] == losses[best_saved]
    kept_folders = {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()}
    assert kept_folders == {f"step-{step:06d}" for step in {best_saved, 9}}
    final, kept = (
        folder / "adapter_model.safetensors"
        for folder in (run / "final", run / "checkpoints" / f"step-{best_saved:06d}")
    )
    assert final.read_bytes() == kept.read_bytes()


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_writes_no_final(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    config = toy_config(
        tmp_path, toy_model, toy_data, train={"max_steps": 6, "learning_rate": 1e30, "lr_scheduler_type": "constant"}
    )
    result = shardtune("train", config, "--run-id", "one", "--nproc", 2)
    assert result.returncode == 1
    assert "NaN on rank 0, NaN on rank 1" in result.stderr and "train.learning_rate" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs" / "one" / "final").exists()


def test_a_tokenizer_of_another_model_is_refused(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path
) -> None:
    other = tmp_path / "tokenizer"
    shutil.copytree(toy_model, other, ignore=shutil.ignore_patterns("*.safetensors"))
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["w00"] = 400
    file.write_text(json.dumps(tokenizer))
    config = toy_config(tmp_path, toy_model, toy_data, model={"tokenizer_name_or_path": str(other)})
    result = shardtune("train", config)
    assert result.returncode == 2
    assert "token id 400" in result.stderr and "only 72 embeddings" in result.stderr
    assert "model.tokenizer_name_or_path" in result.stderr


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_damaged_best_is_set_aside_and_the_next_best_published(
    shardtune: Command, tmp_path: Path, toy_model: Path, toy_data: Path, processes: int
) -> None:
    """The run has ended, two bits of its best checkpoint turn, and it goes on from its newest to write `final/` again."""
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={
            "max_steps": 6, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None,
            "load_best_model_at_end": True, "learning_rate": 0.5, "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2 // processes,
        },
    )  # fmt: skip
    command = ("train", config, "--run-id", "one", "--nproc", processes)
    assert shardtune(*command).returncode == 0
    run = tmp_path / "runs" / "one"
    losses = {event["step"]: event["loss"] for event in events(run, "eval")}
    best, second, _ = sorted(losses, key=losses.__getitem__)
    assert best != 6 and losses[best] < losses[second], "the case this test is about did not arise"
    damaged = run / "checkpoints" / f"step-{best:06d}" / "adapter_model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 0x40  # exponents of the last two numbers: about 1e37
    content[-5] ^= 0x40
    damaged.write_bytes(content)
    result = shardtune(*command, "--resume", "latest")
    assert result.returncode == 0, result.stderr
    assert f"step-{best:06d}: adapter_model.safetensors: changed" in result.stdout
    assert f"eval loss {losses[second]:.4f} (best, step {second})" in result.stdout
    assert events(run, "run_end")[-1]["eval_loss"] == pytest.approx(
        losses[second], abs=1e-9 if processes == 1 else 1e-3
    )
    published = (run / "final" / "adapter_model.safetensors").read_bytes()
    assert published == (run / "checkpoints" / f"step-{second:06d}" / "adapter_model.safetensors").read_bytes()
    (aside,) = (run / "checkpoints").glob(f"damaged-step-{best:06d}-*")
    assert (aside / "adapter_model.safetensors").read_bytes() == bytes(content)
    told = [event["text"] for event in events(run, "warning") if event["about"] == "checkpoint"]
    assert "set aside" in told[0] and f"from step {second}" in told[1]
