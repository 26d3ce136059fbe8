from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from shardtune.config.schema import ModelSection
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.model.load import load_model, load_tokenizer

Change = Callable[..., Path]


def section(name: object, **settings: Any) -> ModelSection:
    return ModelSection(**{"model_name_or_path": str(name), "torch_dtype": "float32", **settings})


def refusal(load: Callable[[ModelSection], Any], name: object, **settings: Any) -> ShardtuneError:
    with pytest.raises(ShardtuneError) as caught:
        load(section(name, **settings))
    return caught.value


@pytest.fixture
def copy(toy_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_model, tmp_path / "copy"))


@pytest.fixture
def configured(copy: Path) -> Change:
    """The toy with another config.json (a key set to None is left out)."""

    def change(file: str = "config.json", **settings: Any) -> Path:
        held = {**json.loads((copy / file).read_text()), **settings}
        (copy / file).write_text(json.dumps({key: value for key, value in held.items() if value is not None}))
        return copy

    return change


def test_the_weights_are_those_of_the_folder(toy_model: Path) -> None:
    model = load_model(section(toy_model))
    tensors = load_file(toy_model / "model.safetensors")
    assert {name for name, _ in model.named_parameters()} == set(tensors)
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())
    assert model.config.use_cache is False


@pytest.mark.parametrize(
    ("dtype", "held"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.bfloat16)]
)
def test_the_weights_are_held_as_asked(toy_model: Path, tmp_path: Path, dtype: str, held: torch.dtype) -> None:
    LlamaForCausalLM.from_pretrained(toy_model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(section(tmp_path, torch_dtype=dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {held}


def test_a_tilde_means_the_home_folder(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(copy.parent))
    assert load_model(section("~/copy")).config.vocab_size == 72
    assert load_tokenizer(section("~/copy")).eos_token == "</s>"


def test_a_tied_head_is_not_taken_for_a_missing_one(configured: Change, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    model = load_model(section(configured(tie_word_embeddings=True)))
    assert torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("renamed", [False, True])
def test_parameters_the_checkpoint_lacks_are_an_error_not_random(configured: Change, copy: Path, renamed: bool) -> None:
    if renamed:  # as in a vision and text wrapper
        tensors = load_file(copy / "model.safetensors")
        save_file({f"language_model.{k}": v for k, v in tensors.items()}, copy / "model.safetensors", {"format": "pt"})
    problem = refusal(load_model, copy if renamed else configured(num_hidden_layers=3))
    assert f"{21 if renamed else 9} parameters of LlamaForCausalLM are missing from the checkpoint" in problem.what
    assert ("lm_head.weight" if renamed else "model.layers.2.mlp.down_proj.weight") in problem.what
    assert f"and {16 if renamed else 4} more" in problem.what
    assert ("language_model.lm_head.weight" in problem.why) == renamed  # what is there instead
    assert "model.model_name_or_path" in problem.fix


def test_parameters_of_another_shape_are_named_with_both_shapes(configured: Change) -> None:
    problem = refusal(load_model, configured(vocab_size=100))
    assert "2 tensors" in problem.what
    assert "lm_head.weight ([72, 32] in the checkpoint, [100, 32] in the model)" in problem.what


def test_tensors_the_model_has_no_place_for_are_an_error_unless_they_are_named(configured: Change) -> None:
    problem = refusal(load_model, configured(num_hidden_layers=1))
    assert "9 tensors of the checkpoint match no parameter of LlamaForCausalLM: model.layers.1." in problem.what
    assert "model.ignore_tensors" in problem.fix
    model = load_model(section(configured(num_hidden_layers=1), ignore_tensors=[r"layers\.1\."]))
    assert model.config.num_hidden_layers == 1


@pytest.mark.parametrize("damage", ["cut", "header", "pointer", "empty"])
def test_damaged_weights_are_told_with_the_file(copy: Path, damage: str) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    weights.write_bytes({"cut": whole[:-9], "header": whole[:100], "pointer": pointer, "empty": b""}[damage])
    problem = refusal(load_model, copy)
    assert isinstance(problem, UserInputError)
    assert "model.safetensors' is" in problem.what
    told = {
        "cut": "94,887 bytes, its header describes 94,896",
        "header": "100 bytes, too short",
        "empty": "0 bytes",
    }
    assert told.get(damage, "git-lfs pointer") in problem.what
    assert ("git lfs pull" if damage == "pointer" else "download it again") in problem.fix


def test_a_missing_shard_is_told_by_name(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors missing" in refusal(load_model, copy).what


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"model_type": "t5"}, "T5Config"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_attention_heads": 5}, "attention"),
    ],
)
def test_a_config_that_is_no_causal_language_model_is_told(configured: Change, settings: dict, why: str) -> None:
    problem = refusal(load_model, configured(**settings))
    assert isinstance(problem, UserInputError)
    assert "could not be loaded as a causal language model" in problem.what
    assert why in problem.why
    assert "model.model_name_or_path" in problem.fix


def test_an_attention_that_is_not_installed_is_told(toy_model: Path) -> None:
    problem = refusal(load_model, toy_model, attn_implementation="flash_attention_2")
    assert "FlashAttention2" in problem.why
    assert "model.attn_implementation" in problem.fix


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_name_without_a_network_fails_at_once_and_says_what_else_works(load: Any) -> None:
    problem = refusal(load, "some-org/some-model")
    assert "'some-org/some-model'" in problem.what
    assert "connect" in problem.why or "outgoing traffic has been disabled" in problem.why
    assert "folder" in problem.fix


def test_a_folder_that_is_not_a_model_is_refused_before_loading(tmp_path: Path) -> None:
    assert "no config.json" in refusal(load_model, tmp_path).what


def test_a_padding_token_is_kept(toy_model: Path) -> None:
    tokenizer = load_tokenizer(section(toy_model))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")


def test_the_end_token_pads_where_there_is_no_padding_token(configured: Change) -> None:
    tokenizer = load_tokenizer(section(configured("tokenizer_config.json", pad_token=None)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_tokenizer_with_neither_is_refused(configured: Change) -> None:
    problem = refusal(load_tokenizer, configured("tokenizer_config.json", pad_token=None, eos_token=None))
    assert "neither a padding nor an end-of-sequence token" in problem.what
    assert "tokenizer_config.json" in problem.fix


def test_a_tokenizer_may_come_from_elsewhere(toy_model: Path, configured: Change) -> None:
    elsewhere = configured("tokenizer_config.json", pad_token="<unk>")
    assert load_tokenizer(section(toy_model, tokenizer_name_or_path=str(elsewhere))).pad_token == "<unk>"


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"model_name_or_path": "org/model", "revision": "v2"}, ("org/model", "v2")),
        ({"model_name_or_path": "org/model"}, ("org/model", "main")),
        # a revision is one of the model's repository, which the tokenizer's need not have
        (
            {"model_name_or_path": "org/model", "revision": "v2", "tokenizer_name_or_path": "org/tok"},
            ("org/tok", "main"),
        ),
    ],
)
def test_the_revision_is_asked_of_the_model_s_repository_only(
    monkeypatch: pytest.MonkeyPatch, settings: dict, asked: tuple[str, str]
) -> None:
    calls = []

    def fake(name: str, revision: str, **_: Any) -> Any:
        calls.append((name, revision))
        raise OSError("not here")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fake)
    with pytest.raises(UserInputError):
        load_tokenizer(ModelSection(**settings))
    assert calls == [asked]


@pytest.mark.parametrize("name", ["./nope", "/nope/nope", "~/nope"])
def test_a_tokenizer_folder_that_does_not_exist_is_told(toy_model: Path, name: str) -> None:
    problem = refusal(load_tokenizer, toy_model, tokenizer_name_or_path=name)
    assert f"'{name}' does not exist" in problem.what
    assert "the Hub is not queried" in problem.why
    assert "model.tokenizer_name_or_path" in problem.fix


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_without_a_tokenizer_is_told(copy: Path, content: str | None) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    if content is not None:
        (copy / "tokenizer.json").write_text(content)
    problem = refusal(load_tokenizer, copy)
    assert isinstance(problem, UserInputError)
    assert f"Could not load a tokenizer from '{copy}'" in problem.what
    assert problem.why
    assert "tokenizer.json" in problem.fix


def test_a_hub_name_is_found_in_the_cache_without_a_network(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "models--some-org--some-model"
    shutil.copytree(toy_model, stored / "snapshots" / "abc")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    model = load_model(section("some-org/some-model"))
    assert torch.equal(model.lm_head.weight, load_file(toy_model / "model.safetensors")["lm_head.weight"])
