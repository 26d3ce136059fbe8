"""The Triton passes against their twins: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1) where it is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from shardtune.kernels import fp8, fp8_products

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if ON_GPU else "cpu"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 32), (130, 257), (3, 200, 129)])
def test_codes_are_transposed(shape: tuple[int, ...]) -> None:
    from shardtune.kernels.fp8_passes import transpose_codes

    codes = (draw(*shape) * 100).to(fp8.CODES)
    turned = transpose_codes(codes.to(DEVICE)).cpu()
    assert turned.is_contiguous() and torch.equal(turned.float(), codes.float().transpose(-2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(1, 600), (7, 600), (999, 999), (12, 100), (128, 128)])
def test_codes_are_dequantised_as_their_twin_does_it(block: tuple[int, int], dtype: torch.dtype) -> None:
    from shardtune.kernels.fp8_passes import dequantize_codes

    codes = (draw(2, 50, 600) * 100).clamp(-448, 448).to(fp8.CODES)
    scale = draw(*fp8.scale_shape(codes.shape, block), seed=1).abs()
    got = dequantize_codes(codes.to(DEVICE), scale.to(DEVICE), block, dtype)
    meant = fp8.dequantize_rows(codes, scale, block, 0, dtype)
    if ON_GPU or dtype == torch.float32:
        assert torch.equal(got.cpu(), meant)
    else:  # the interpreter cuts a bfloat16 off instead of rounding it
        assert torch.allclose(got.float(), meant.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", ["nothing", "rows", "groups"])
@pytest.mark.parametrize(("columns", "width"), [(384, 128), (384, 384), (9000, 9000), (16500, 16500)])
def test_rows_are_rounded_as_their_twin_does_it(columns: int, width: int, by: str, dtype: torch.dtype) -> None:
    from shardtune.kernels.fp8_passes import round_rows

    x = draw(6, columns).to(dtype)
    x[2] = 0
    scales = {"nothing": None, "rows": draw(columns, seed=1), "groups": draw(3, columns, seed=1)}[by]
    group = torch.tensor([0, 0, 1, 2, 2, 2]) if by == "groups" else None
    meant_codes, meant_scale = fp8_products.rounded(x, width, scales, group)
    there = [None if t is None else t.to(DEVICE) for t in (scales, group)]
    codes, scale = round_rows(x.to(DEVICE), width, *there)
    assert torch.equal(scale.cpu(), meant_scale)
    differ = codes.cpu().float() != meant_codes.float()  # not their bytes: a zero may have a sign
    # The interpreter loses the carry where rounding up reaches the next power of two.
    assert not differ.any() if ON_GPU else differ.float().mean() < 0.05
    assert columns == width or scale.stride() == (1, 6)  # as the product of pieces and blocks asks for


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gets_a_scale_that_is_not(bad: float) -> None:
    from shardtune.kernels.fp8_passes import round_rows

    x = draw(3, 64)
    x[1, 5] = bad
    codes, scale = round_rows(x.to(DEVICE), 64, None, None)
    values = codes.float() * scale
    assert not scale[1].isfinite() and not values[1].isfinite().any() and values[[0, 2]].isfinite().all()
