"""What is merged is compared on the GPU, where there is one, and faults are found there too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export.exporting import export
from export.test_logits_check import samples
from export.test_merged_fp8 import fp8_wrapper
from tuned_toys import CASES, tuned_toy

from shardtune.errors import ShardtuneError
from shardtune.export.logits_check import LogitsComparison
from shardtune.inference.source import find_tuned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_verified(case: str, tmp_path: Path) -> None:
    tuned_toy(case, tmp_path)
    done = export(tmp_path / "adapter", tmp_path / "out", dtype="bf16")
    assert done.verification.method == "logits"
    assert done.verification.figures["logits_share"] == pytest.approx(1, abs=0.05)
    with pytest.raises(ShardtuneError, match="does not do what adapter and base do"):
        LogitsComparison(find_tuned(str(tmp_path / "adapter")), {}, {}).check(tmp_path / "base", samples())


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_that_of_an_fp8_base_is_verified(dtype: str | None, tmp_path: Path) -> None:
    fp8_wrapper(tmp_path, "blocks", size=1.0)
    assert export(tmp_path / "adapter", tmp_path / "out", dtype=dtype).verification.method == "logits"
