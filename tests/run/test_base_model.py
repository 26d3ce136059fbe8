"""An adapter belongs to one base model: a moved one is known again, and another is refused or named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardtune.errors import UserInputError
from shardtune.run.base_model import BaseModel, compare_bases, record_base, recorded_base


def model(folder: Path, kind: str = "llama", *, hidden: int = 8, weights: bytes = b"w" * 300_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": hidden}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One that recorded its base, in which an adapter lies."""
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"started": 1.0}))
    base = model(tmp_path / "base")
    described = BaseModel.read(str(base), base)
    assert described is not None
    record_base(tmp_path / "run", described)
    assert recorded_base(tmp_path / "run") == described
    assert json.loads((tmp_path / "run" / "run.json").read_text())["started"] == 1.0
    return tmp_path / "run"


def compared(run: Path, folder: Path) -> str:
    return compare_bases(run / "final", "unused", str(folder), folder, option="--model")


def test_a_base_that_was_moved_is_the_same(run: Path, tmp_path: Path) -> None:
    assert compared(run, tmp_path / "base") == ""
    shutil.move(tmp_path / "base", tmp_path / "moved")
    assert compared(run, tmp_path / "moved") == ""


def test_other_weights_of_the_same_architecture_are_named_in_a_notice(run: Path, tmp_path: Path) -> None:
    other = model(tmp_path / "other", weights=b"x" * 300_000)
    notice = compared(run, other)
    assert str(tmp_path / "base") in notice and str(other) in notice and "same weights" in notice


def test_files_that_changed_where_they_were_are_noticed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "base" / "model.safetensors").write_bytes(b"y" * 300_000)
    assert "have changed since training" in compared(run, tmp_path / "base")


@pytest.mark.parametrize(
    ("other", "why"), [({"kind": "gemma2"}, "gemma2"), ({"hidden": 16}, "hidden_size was 8 in training and is 16")]
)
def test_another_architecture_is_refused_with_both_named(
    run: Path, tmp_path: Path, other: dict[str, object], why: str
) -> None:
    folder = model(tmp_path / "other", **other)  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="was trained on another model") as refused:
        compared(run, folder)
    said = str(refused.value)
    assert why in said and str(folder) in said and str(tmp_path / "base") in said and "--model" in refused.value.fix


def test_a_damaged_record_says_nothing(run: Path, tmp_path: Path) -> None:
    (run / "run.json").write_text('{"base": {"name": 3}}')
    assert recorded_base(run) is None
    assert compare_bases(run / "final", str(tmp_path / "base"), str(tmp_path / "base"), None, option="--model") == ""
