"""What lies on the disk is known before training: complete, and as the index says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardtune.errors import UserInputError
from shardtune.model.safetensors_headers import INDEX, read_headers

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.ones(5, dtype=torch.bfloat16),
    "c.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
    "d.scale": torch.tensor(2.0),
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two files and their index."""
    names = list(TENSORS)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[2 * i : 2 * i + 2] for i in range(2)}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, tmp_path / file, {"format": "pt"})
    weight_map = {name: file for file, held in files.items() for name in held}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def change_index(folder: Path, **entries: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    weight_map = {**index["weight_map"], **entries}
    index["weight_map"] = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    with pytest.raises(UserInputError) as caught:
        read_headers(folder)
    assert caught.value.fix
    return caught.value.what


def test_every_tensor_is_found_where_it_lies(shards: Path) -> None:
    found = read_headers(shards)
    assert set(found) == set(TENSORS)
    for name, tensor in found.items():
        assert (tensor.torch_dtype, tensor.shape) == (TENSORS[name].dtype, tuple(TENSORS[name].shape))
        raw = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert raw == TENSORS[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_numbered_shards_need_no_index(shards: Path) -> None:
    (shards / INDEX).unlink()
    assert set(read_headers(shards)) == set(TENSORS)
    (shards / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors missing" in refusal(shards)


def test_a_single_file_under_another_name_is_taken(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert set(read_headers(tmp_path)) == set(TENSORS)
    save_file(TENSORS, tmp_path / "more.safetensors")
    assert "no model.safetensors.index.json that lists those" in refusal(tmp_path)


def test_files_the_index_does_not_name_are_left_alone(shards: Path) -> None:
    save_file({"x": torch.ones(1)}, shards / "consolidated.safetensors")
    assert set(read_headers(shards)) == set(TENSORS)


def test_a_missing_file_is_named(shards: Path) -> None:
    (shards / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors missing" in refusal(shards)


@pytest.mark.parametrize("keep", [-1, 100, 8, 3, 0])
def test_a_truncated_file_is_named(shards: Path, keep: int) -> None:
    file = shards / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model-00002-of-00002.safetensors' is damaged" in refusal(shards)


def test_a_file_with_something_behind_its_end_is_damaged_too(shards: Path) -> None:
    file = shards / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    assert "is damaged: it has" in refusal(shards)


def test_a_header_that_lies_about_a_size_is_damage(shards: Path) -> None:
    file = shards / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[3,4]', b'"shape":[3,5]'))
    assert "'a.weight' of shape [3, 5] has 48 bytes" in refusal(shards)


def test_an_index_that_names_what_no_file_has_is_refused(shards: Path) -> None:
    change_index(shards, **{"ghost.weight": "model-00001-of-00002.safetensors"})
    assert "lists tensors that are in no file: ghost.weight" in refusal(shards)


def test_an_index_that_names_the_wrong_file_is_refused(shards: Path) -> None:
    change_index(shards, **{"a.weight": "model-00002-of-00002.safetensors"})
    assert "lists the wrong file for: a.weight" in refusal(shards)


def test_an_index_that_leaves_a_tensor_out_is_refused(shards: Path) -> None:
    change_index(shards, **{"a.weight": None})
    assert "does not list tensors of the files: a.weight" in refusal(shards)


def test_a_tensor_stored_twice_is_refused(shards: Path) -> None:
    file = shards / "model-00002-of-00002.safetensors"
    save_file({**load_file(file), "a.weight": TENSORS["a.weight"]}, file)
    assert "'a.weight' is stored twice" in refusal(shards)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(shards: Path, text: str) -> None:
    (shards / INDEX).write_text(text)
    assert "is not a valid safetensors index" in refusal(shards)


def test_an_index_cannot_point_outside_its_folder(shards: Path) -> None:
    change_index(shards, **{"a.weight": "../model-00001-of-00002.safetensors"})
    assert "outside its folder" in refusal(shards)
