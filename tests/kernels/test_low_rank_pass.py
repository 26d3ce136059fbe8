"""The Triton kernel that adds a product of low rank against `addmm_`: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if ON_GPU else "cpu"


def draw(*shape: int, seed: int) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32)


@pytest.mark.parametrize("rank", [1, 4, 16, 24, 128])
@pytest.mark.parametrize(("n", "m"), [(64, 128), (100, 333), (7, 40)])
@pytest.mark.parametrize("turned", [False, True], ids=["A", "B transposed"])
def test_it_is_addmm(n: int, m: int, rank: int, turned: bool) -> None:
    from shardtune.kernels.low_rank_pass import add_low_rank_

    target, left = draw(n, m, seed=1), draw(n, rank, seed=2)
    right = draw(m, rank, seed=3).t() if turned else draw(rank, m, seed=3)
    meant = target.double().addmm(left.double(), right.double(), alpha=0.3)
    got = add_low_rank_(target, left, right, alpha=0.3)
    assert got.data_ptr() == target.data_ptr()
    assert ((got.double() - meant).norm() / meant.norm()).item() < (4e-3 if ON_GPU else 1e-5)


def test_what_lies_beside_the_target_is_left_alone() -> None:
    from shardtune.kernels.low_rank_pass import add_low_rank_

    whole = draw(70, 200, seed=1)
    before = whole.clone()
    add_low_rank_(whole[3:60, 10:150], draw(57, 16, seed=2), draw(16, 140, seed=3))
    changed = whole != before
    assert changed[3:60, 10:150].float().mean() > 0.9
    changed[3:60, 10:150] = False
    assert not changed.any()
