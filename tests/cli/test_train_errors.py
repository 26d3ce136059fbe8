"""Bad input to `shardtune train`: one clear message, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Command
from toys import toy_config


@pytest.fixture
def config(tmp_path: Path, toy_model: Path, toy_data: Path) -> Path:
    return toy_config(tmp_path, toy_model, toy_data)


def failed(shardtune: Command, *args: object) -> str:
    """The message of a command that must fail as a user's mistake does."""
    result = shardtune(*args)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())  # as one line: where it breaks depends on the terminal


def test_a_missing_config_file_is_named(shardtune: Command, tmp_path: Path) -> None:
    assert f"there is no file '{tmp_path}/none.yaml'" in failed(shardtune, "train", tmp_path / "none.yaml")


def test_all_problems_of_a_file_come_at_once_and_no_folder_is_made(shardtune: Command, config: Path) -> None:
    config.write_text(config.read_text().replace("learning_rate:", "learnng_rate:").replace("r: 4", "r: 0"))
    message = failed(shardtune, "train", config)
    assert "2 problems found" in message
    assert "train.learnng_rate" in message and "did you mean `learning_rate`?" in message
    assert f"{config}:" in message and "expected a whole number, at least 1; got 0" in message
    assert not (config.parent / "runs").exists()


def test_a_model_path_that_does_not_exist_is_named(shardtune: Command, config: Path) -> None:
    message = failed(shardtune, "train", config, "-o", "model.model_name_or_path=/no/such/model")
    assert "The model folder '/no/such/model' does not exist." in message
    assert "model.model_name_or_path" in message


def test_a_folder_that_is_not_a_model_says_what_it_holds(shardtune: Command, config: Path, toy_data: Path) -> None:
    message = failed(shardtune, "train", config, "-o", f"model.model_name_or_path={toy_data}")
    assert "has no config.json" in message and "train.jsonl" in message


def test_a_dataset_path_that_does_not_exist_is_named(shardtune: Command, config: Path) -> None:
    message = failed(shardtune, "train", config, "-o", "data.dataset_name_or_path=./nothing.jsonl")
    assert "The dataset './nothing.jsonl' does not exist." in message


def test_an_existing_run_is_never_written_over(shardtune: Command, config: Path) -> None:
    run = config.parent / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "final").mkdir()
    message = failed(shardtune, "train", config, "--run-id", "mine")
    assert "The run 'mine' already exists" in message and "another --run-id" in message
    assert [path.name for path in run.iterdir()] == ["final"]


@pytest.mark.slow
def test_a_mistake_found_late_is_told_once_and_leaves_the_runs_name_free(shardtune: Command, config: Path) -> None:
    message = failed(
        shardtune, "train", config, "--run-id", "mine", "--nproc", "2", "-o", "lora.target_modules=[q_proj,querry]"
    )
    assert message.count("'querry' matches no linear layer of LlamaForCausalLM") == 1
    assert "Its linear layers are: q_proj (×2), k_proj (×2)" in message
    assert list((config.parent / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_column_that_is_not_there_is_answered_with_those_that_are(shardtune: Command, config: Path) -> None:
    message = failed(shardtune, "train", config, "-o", "data.prompt_template={question} {reply}")
    assert "lacks the column 'reply'" in message and "question, answer, text" in message


@pytest.mark.slow
def test_a_split_that_is_not_there_is_answered_with_those_that_are(shardtune: Command, config: Path) -> None:
    message = failed(shardtune, "train", config, "-o", "data.val_split=dev")
    assert "has no split 'dev'" in message and "train, validation" in message and "data.val_split" in message


def test_nproc_must_be_a_number_or_auto(shardtune: Command, config: Path) -> None:
    message = failed(shardtune, "train", config, "--nproc", "0")
    assert "parallel.nproc" in message
    assert "parallel.nproc" in failed(shardtune, "train", config, "--nproc", "two")


@pytest.mark.slow
def test_cuda_asked_for_without_a_gpu_says_what_torch_sees(shardtune: Command, config: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    message = failed(shardtune, "train", config, "-o", "parallel.device=cuda")
    assert "torch sees no CUDA device" in message and "parallel.device" in message


def test_half_an_environment_of_a_scheduler_is_named(shardtune: Command, config: Path) -> None:
    result = shardtune("train", config, env={"RANK": "0"})
    assert result.returncode == 2
    assert "WORLD_SIZE is not set" in result.stderr
