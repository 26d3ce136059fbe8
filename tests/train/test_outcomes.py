"""How a run ends: with the best checkpoint that was kept, or with an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from interrupted import run
from running import Command, events
from toys import toy_config

from shardtune.errors import UserInputError


def test_the_best_is_the_best_of_what_was_saved(tmp_path: Path, toy_model: Path, toy_data: Path) -> None:
    """Evaluated every step, saved every third, and the loss rises at the end: the best evaluation was never saved."""
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={
            "max_steps": 9, "eval_steps": 1, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1,
            "load_best_model_at_end": True, "learning_rate": 0.5, "lr_scheduler_type": "constant",
        },
    )  # fmt: skip
    assert run(config, run_id="one") == 0
    folder = tmp_path / "runs" / "one"
    losses = {event["step"]: event["loss"] for event in events(folder, "eval")}
    best_saved = min((3, 6, 9), key=losses.__getitem__)
    assert min(losses, key=losses.__getitem__) != best_saved, "the case this test is about did not arise"
    assert events(folder, "run_end")[0]["eval_loss"] == losses[best_saved]
    kept_folders = {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()}
    assert kept_folders == {f"step-{step:06d}" for step in {best_saved, 9}}
    final, kept = (
        adapter / "adapter_model.safetensors"
        for adapter in (folder / "final", folder / "checkpoints" / f"step-{best_saved:06d}")
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


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, toy_model: Path, toy_data: Path) -> None:
    other = tmp_path / "tokenizer"
    shutil.copytree(toy_model, other, ignore=shutil.ignore_patterns("*.safetensors"))
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["w00"] = 400
    file.write_text(json.dumps(tokenizer))
    config = toy_config(tmp_path, toy_model, toy_data, model={"tokenizer_name_or_path": str(other)})
    with pytest.raises(UserInputError, match=r"(?s)token id 400.*only 72 embeddings.*model.tokenizer_name_or_path"):
        run(config)


def test_a_damaged_best_is_set_aside_and_the_next_best_published(
    tmp_path: Path, toy_model: Path, toy_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has ended, two bits of its best checkpoint turn, and it goes on from its newest to write `final/` again."""
    config = toy_config(
        tmp_path, toy_model, toy_data,
        data={"val_split": "validation"},
        train={
            "max_steps": 6, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None,
            "load_best_model_at_end": True, "learning_rate": 0.5, "lr_scheduler_type": "constant",
        },
    )  # fmt: skip
    assert run(config, run_id="one") == 0
    folder = tmp_path / "runs" / "one"
    losses = {event["step"]: event["loss"] for event in events(folder, "eval")}
    best, second, _ = sorted(losses, key=losses.__getitem__)
    assert best != 6 and losses[best] < losses[second], "the case this test is about did not arise"
    damaged = folder / "checkpoints" / f"step-{best:06d}" / "adapter_model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 0x40  # exponents of the last two numbers: about 1e37
    content[-5] ^= 0x40
    damaged.write_bytes(content)
    assert run(config, "train.resume=latest", run_id="one") == 0
    said = capsys.readouterr().out
    assert f"step-{best:06d}: adapter_model.safetensors: changed" in said
    assert f"eval loss {losses[second]:.4f} (best, step {second})" in said
    assert events(folder, "run_end")[-1]["eval_loss"] == pytest.approx(losses[second], abs=1e-9)
    published = (folder / "final" / "adapter_model.safetensors").read_bytes()
    assert published == (folder / "checkpoints" / f"step-{second:06d}" / "adapter_model.safetensors").read_bytes()
    (aside,) = (folder / "checkpoints").glob(f"damaged-step-{best:06d}-*")
    assert (aside / "adapter_model.safetensors").read_bytes() == bytes(content)
    told = [event["text"] for event in events(folder, "warning") if event["about"] == "checkpoint"]
    assert "set aside" in told[0] and f"from step {second}" in told[1]
