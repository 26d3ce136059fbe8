"""Products of float8 codes: what rounding costs, and that gradients are those of the rounded product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardtune.kernels import fp8, fp8_products


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(got: Tensor, meant: Tensor) -> float:
    return ((got - meant).norm() / meant.norm()).item()


def test_a_linear_layer_is_off_by_the_rounding_of_its_activations_alone() -> None:
    codes, scale = fp8.quantize_rows(draw(48, 64, seed=1))
    rows = fp8_products.row_scales(scale, (1, 64), codes.shape)
    assert rows is not None
    x, twin = (draw(2, 5, 64, seed=2).requires_grad_() for _ in range(2))
    got = fp8_products.linear(x, codes, rows)
    meant = fp8.linear(twin, codes, scale, (1, 64))
    assert 1e-4 < off(got, meant) < 4e-2
    pull = draw(*got.shape, seed=3)
    got.backward(pull)
    meant.backward(pull)
    assert 1e-4 < off(x.grad, twin.grad) < 4e-2  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [(1, 32), (16, 32), (48, 32)])
def test_routed_experts_agree_with_the_dequantised_ones(block: tuple[int, int]) -> None:
    codes = fp8.quantize_rows(draw(4, 48, 32, seed=1))[0]
    scale = draw(*fp8.scale_shape(codes.shape, block), seed=5).abs() + 0.1
    rows = fp8_products.row_scales(scale, block, codes.shape)
    assert rows is not None and rows.shape == (4, 48)
    ends = torch.tensor([3, 3, 10, 12], dtype=torch.int32)
    x, twin = (draw(12, 32, seed=2).requires_grad_() for _ in range(2))
    got = fp8_products.grouped_linear(x, codes, rows, ends)
    weight = fp8.dequantize(codes, scale, block, torch.float32)
    expert = torch.searchsorted(ends, torch.arange(12, dtype=torch.int32), right=True)
    meant = torch.einsum("ni,noi->no", twin, weight[expert])
    assert off(got, meant) < 4e-2
    pull = draw(12, 48, seed=3)
    got.backward(pull)
    meant.backward(pull)
    assert off(x.grad, twin.grad) < 4e-2  # type: ignore[arg-type]


def test_blocks_finer_than_a_row_have_no_row_scales() -> None:
    assert fp8_products.row_scales(torch.ones(2, 2), (32, 32), (64, 64)) is None
    assert fp8_products.row_scales(torch.ones(60, 1), (1, 64), (60, 64)) is None  # not a multiple of 16 bytes


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = fp8_products.quantize_activations(torch.zeros(2, 16))
    assert not codes.float().any() and scale.tolist() == [1.0, 1.0]


def test_codes_are_transposed_matrix_by_matrix() -> None:
    codes = fp8.quantize_rows(draw(3, 5, 7))[0]
    assert torch.equal(fp8_products.transposed(codes).float(), codes.float().transpose(-2, -1))
