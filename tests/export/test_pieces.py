"""However small the pieces are in which weights are merged, the result is the same; and mistakes are found before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export.exporting import export, tensors_of
from export.test_merged_fp8 import fp8_wrapper
from toys import toy_llama
from tuned_toys import CASES, tuned_toy

from shardtune.errors import ShardtuneError, UserInputError


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    export(folder / "adapter", folder / "whole", **options)
    monkeypatch.setattr("shardtune.export.merged_tensors._AT_ONCE", 100)  # elements: a few rows, or less than one
    monkeypatch.setattr("shardtune.export.merged_tensors._COPY_BYTES", 1000)
    export(folder / "adapter", folder / "pieces", **options)
    whole, pieces = tensors_of(folder / "whole"), tensors_of(folder / "pieces")
    assert whole.keys() == pieces.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(pieces[name].float(), tensor.float(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_small_pieces_give_the_same_weights(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_toy(case, tmp_path)
    compare(tmp_path, monkeypatch)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_so_they_do_across_the_blocks_of_an_fp8_base(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8_wrapper(tmp_path, "blocks", size=1.0)
    compare(tmp_path, monkeypatch, dtype=dtype)


def test_where_memory_is_short_it_says_that_logits_were_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_toy("dense", tmp_path)
    monkeypatch.setattr("shardtune.export.logits_check.free_memory", lambda: 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = export(tmp_path / "adapter", tmp_path / "out")
    assert done.verification.method == "weights" and done.as_json()["verified"] == "weights"
    assert any("were not compared" in warning for warning in done.warnings)
    assert "were not compared" in (tmp_path / "out" / "README.md").read_text()


def test_another_base_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    tuned_toy("dense", tmp_path)
    with pytest.raises(UserInputError, match="trained on another model"):
        export(tmp_path / "adapter", tmp_path / "out", base=toy_llama(tmp_path / "other", hidden=64))
    with pytest.raises(UserInputError, match="is not there"):
        export(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "gone")
    file = tmp_path / "base" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserInputError, match="is damaged"):
        export(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_the_disk_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte flips between writing and reading back."""
    from shardtune.export import merged

    tuned_toy("dense", tmp_path)
    write = merged.write_shards

    def written_badly(*args: object, **options: object) -> object:
        checksums = write(*args, **options)  # type: ignore[arg-type]
        file = next(Path(str(args[1])).glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(bytes(content))
        return checksums

    monkeypatch.setattr(merged, "write_shards", written_badly)
    with pytest.raises(ShardtuneError, match="is not what was written"):
        export(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
