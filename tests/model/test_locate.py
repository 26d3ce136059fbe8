from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.errors import UserInputError
from shardtune.model.locate import check_model_folder, looks_local


def refusal(name: object) -> UserInputError:
    with pytest.raises(UserInputError) as caught:
        check_model_folder(str(name))
    assert caught.value.exit_code == 2
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is just enough to pass."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["gpt2", "mistralai/Mistral-Small-4-119B-2603"])
def test_a_hub_name_is_left_to_the_hub(name: str) -> None:
    assert not looks_local(name)
    check_model_folder(name)


def test_a_model_folder_passes_whole_or_in_shards(folder: Path) -> None:
    check_model_folder(str(folder))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    check_model_folder(str(folder))


def test_a_missing_model_in_a_folder_that_is_here_is_not_left_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_model_folder("models/nope")
    (tmp_path / "models").mkdir()
    error = refusal("models/nope")
    assert "'models/nope' does not exist" in error.what and "The folder 'models' is here" in error.why


def test_a_relative_folder_with_the_shape_of_a_hub_name_is_local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder.name).what


def test_a_tilde_means_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    check_model_folder(f"~/{folder.name}")


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", "~/nope", "a/b/c"])
def test_a_path_that_does_not_exist_is_told(name: str) -> None:
    problem = refusal(name)
    assert f"'{name}' does not exist" in problem.what
    assert problem.why == "It looks like a local path, so the Hub was not asked."
    assert "model.model_name_or_path" in problem.fix


def test_a_file_is_not_a_model(folder: Path) -> None:
    problem = refusal(folder / "model.safetensors")
    assert "is a file" in problem.what
    assert "config.json" in problem.fix


def test_a_folder_without_a_config_is_told_with_what_it_holds(folder: Path) -> None:
    (folder / "config.json").unlink()
    problem = refusal(folder)
    assert "not a model" in problem.what
    assert "model.safetensors" in problem.why
    assert "save_pretrained" in problem.fix
    (folder / "model.safetensors").unlink()
    assert "nothing" in refusal(folder).why


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_config_that_is_not_json_is_told(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    problem = refusal(folder)
    assert f"{folder / 'config.json'}' is not valid JSON" in problem.what
    assert problem.why
    assert "again" in problem.fix


@pytest.mark.parametrize("content", ["[]", "null", '"llama"'])
def test_a_config_that_is_no_object_is_told(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "not a JSON object" in refusal(folder).what


def test_a_folder_without_weights_is_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    problem = refusal(folder)
    assert "no safetensors weights" in problem.what
    assert "save_pretrained" in problem.fix
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin, a pickle format that is not supported" in refusal(folder).why


def test_looking_needs_no_torch() -> None:
    code = "import sys; import shardtune.model.locate, shardtune.data.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
