"""FP8 weights: a value is its code times the scale of its block, whoever dequantises it and whichever rows at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardtune.kernels import fp8
from shardtune.kernels.fp8_operators import linear

BLOCKS = {"tensor": (300, 200), "row": (1, 200), "ragged": (128, 128), "small": (7, 3), "larger": (512, 512)}


def quantised(shape: tuple[int, ...], block: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(shape, generator=generator) * 30).to(fp8.CODES)
    scale = torch.rand(fp8.scale_shape(shape, block), generator=generator) * 0.01 + 1e-4
    return codes, scale


def one_by_one(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The definition: the scale of element (r, c) stands at (r // rows, c // columns)."""
    rows = torch.arange(codes.shape[-2]) // block[0]
    columns = torch.arange(codes.shape[-1]) // block[1]
    return codes.float() * scale[..., rows, :][..., columns]


def test_values_are_those_computed_by_hand() -> None:
    codes = torch.tensor([[1.0, -2.0, 448.0], [0.5, 0.0, 3.5], [16.0, -1.75, 2.0]]).to(fp8.CODES)
    scale = torch.tensor([[0.5, 2.0], [10.0, 0.25]])
    expected = torch.tensor([[0.5, -1.0, 896.0], [0.25, 0.0, 7.0], [160.0, -17.5, 0.5]])
    torch.testing.assert_close(fp8.dequantize(codes, scale, (2, 2), torch.float32), expected, rtol=0, atol=0)


def test_the_product_is_rounded_once() -> None:
    # 1.125 × 1.00390625 = 1.12939453125. Of the neighbours in bfloat16, 1.125 and 1.1328125, the second is nearer; a
    # scale rounded to bfloat16 first would be 1.0 and give the first.
    codes, scale = torch.tensor([[1.125]]).to(fp8.CODES), torch.tensor([[1.00390625]])
    assert fp8.dequantize(codes, scale, (1, 1), torch.bfloat16).item() == 1.1328125


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leading", [(), (3,)])
def test_every_element_takes_the_scale_of_its_block(
    block: tuple[int, int], dtype: torch.dtype, leading: tuple[int, ...]
) -> None:
    codes, scale = quantised((*leading, 300, 200), block)
    expected = one_by_one(codes, scale, block).to(dtype)
    assert torch.equal(fp8.dequantize(codes, scale, block, dtype), expected)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("piece", [1, 5000, 1 << 24])
def test_pieces_and_slices_of_rows_equal_the_whole_bit_for_bit(
    block: tuple[int, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scale = quantised((300, 200), block)
    whole = fp8.dequantize(codes, scale, block, torch.bfloat16)
    monkeypatch.setattr(fp8, "_PIECE", piece)
    assert torch.equal(fp8.dequantize(codes, scale, block, torch.bfloat16), whole)
    for first, last in ((0, 300), (0, 1), (1, 2), (100, 129), (127, 300), (130, 131), (299, 300), (50, 50)):
        rows = fp8.dequantize_rows(codes[first:last], scale, block, first, torch.bfloat16)
        assert torch.equal(rows, whole[first:last])


def test_scales_that_do_not_fit_are_refused() -> None:
    codes, scale = quantised((300, 200), (128, 128))
    with pytest.raises(ValueError, match=r"\(3, 2\), not \(2, 2\)"):
        fp8.dequantize(codes, scale[:2], (128, 128), torch.float32)
    with pytest.raises(ValueError, match="not covered"):
        fp8.dequantize_rows(codes[:100], scale, (128, 128), 300, torch.float32)
    with pytest.raises(ValueError, match="float32 scales"):
        fp8.dequantize(codes, scale.bfloat16(), (128, 128), torch.float32)


def test_a_row_is_quantised_by_its_own_largest_element() -> None:
    weight = torch.tensor([[448.0, -1.0, 0.0], [-0.5, 0.25, 0.125], [0.0, 0.0, 0.0], [0.017, 0.3, 17.0]])
    codes, scale = fp8.quantize_rows(weight)
    assert scale[:3].tolist() == [[1.0], [torch.tensor(0.5 / 448).item()], [1.0]]
    assert codes.float()[:3].tolist() == [[448.0, -1.0, 0.0], [-448.0, 224.0, 112.0], [0.0, 0.0, 0.0]]
    assert codes[3, 2].float() == 448.0
    assert not fp8.dequantize(codes, scale, (1, 3), torch.float32).isnan().any()


@pytest.mark.parametrize("shape", [(64, 48), (4, 16, 48)])
def test_the_reported_error_is_the_difference_to_the_dequantised_weight(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    monkeypatch.setattr(fp8, "_PIECE", 100)  # several pieces
    codes, scale = fp8.quantize_rows(weight)
    assert codes.shape == weight.shape and scale.shape == (*shape[:-1], 1)
    difference = one_by_one(codes, scale, (1, 48)) - weight.float()
    relative, largest = fp8.quantization_error(weight, codes, scale)
    assert relative == pytest.approx((difference.norm() / weight.float().norm()).item(), rel=1e-4)
    assert largest == pytest.approx(difference.abs().max().item(), rel=1e-5)
    assert 0.01 < relative < 0.04  # three bits of mantissa


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_shows_in_the_error(bad: float) -> None:
    weight = torch.ones(4, 8)
    weight[1, 2] = bad
    errors = fp8.quantization_error(weight, *fp8.quantize_rows(weight))
    assert all(error != error for error in errors)


def test_an_empty_shard_can_be_quantised_and_dequantised() -> None:
    codes, scale = fp8.quantize_rows(torch.empty(0, 16, 8))
    assert fp8.dequantize(codes, scale, (1, 8), torch.bfloat16).shape == (0, 16, 8)
    assert fp8.quantization_error(torch.empty(0, 16, 8), codes, scale) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_linear_product_and_its_gradients_equal_the_twins(block: tuple[int, int], dtype: torch.dtype) -> None:
    codes, scale = quantised((300, 200), block)
    inputs = torch.randn(2, 5, 200, dtype=dtype)
    out_grad = torch.randn(2, 5, 300, dtype=dtype)
    results = []
    for fast in (True, False):
        x, bias = inputs.clone().requires_grad_(), torch.ones(300, dtype=dtype).requires_grad_()
        weight = fp8.dequantize(codes, scale, block, dtype)
        y = linear(x, codes, scale, block, bias) if fast else F.linear(x, weight, bias)
        y.backward(out_grad)
        results.append((y, x.grad, bias.grad))
    for mine, twins in zip(*results, strict=True):
        torch.testing.assert_close(mine, twins, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_only_codes_and_scales_are_kept_for_backward() -> None:
    codes, scale = quantised((300, 200), (128, 128))
    kept: list[torch.Tensor] = []
    x = torch.randn(4, 200, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, codes, scale, (128, 128))
    assert {(t.dtype, t.data_ptr()) for t in kept} == {(t.dtype, t.data_ptr()) for t in (codes, scale)}
