"""What is left of a change after rounding is measured as it was in the experiment that decided about FP8."""

from __future__ import annotations

import pytest
import torch

from shardtune.export.fp8_rounding import BlockScales
from shardtune.export.survival import Survival, by_share, together
from shardtune.kernels import fp8

BLOCK = (128, 128)


def on_the_grid(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian weights as an FP8 checkpoint holds them, and their scales."""
    largest = weight.abs().unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))
    scales = (largest / fp8.LARGEST_CODE)[None]
    return BlockScales(scales, BLOCK, torch.float32).quantize(weight, 0, 0)[1], scales


@pytest.mark.parametrize(("size", "left"), [(0.002, 0.08), (0.01, 0.36), (0.03, 0.79), (0.1, 0.99)])
def test_onto_fp8_a_small_change_is_lost(size: float, left: float) -> None:
    torch.manual_seed(0)
    base, scales = on_the_grid(torch.randn(512, 1024) * 0.02)
    tuned = base + torch.randn_like(base) * size * base.std()
    rounding = BlockScales(scales, BLOCK, torch.float32)
    rounding.measure(tuned, 0, 0)
    survival = Survival()
    survival.add(base, tuned, rounding.quantize(tuned, 0, 0)[1])
    assert survival.share == pytest.approx(left, abs=0.02)


@pytest.mark.parametrize(("size", "left"), [(0.002, 0.81), (0.01, 1.0)])
def test_onto_bf16_nearly_all_of_it_stays(size: float, left: float) -> None:
    torch.manual_seed(0)
    base = (torch.randn(512, 1024) * 0.02).bfloat16().float()
    tuned = base + torch.randn_like(base) * size * base.std()
    survival = Survival()
    survival.add(base, tuned, tuned.bfloat16().float())
    assert survival.share == pytest.approx(left, abs=0.01)


def test_the_measure_is_the_projection_and_the_error_is_relative_to_the_change() -> None:
    old, new = torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0])
    survival = Survival()
    survival.add(old, new, torch.tensor([4.0, 1.0]))  # of the change (3, 4) there is (3, 0)
    assert survival.share == pytest.approx(9 / 25)
    assert survival.noise == pytest.approx(4 / 5)
    untouched = Survival()
    untouched.add(old, old, old)
    assert [name for name, _ in by_share({"a": survival, "b": untouched})] == ["a"]
    assert together({"a": survival, "b": untouched}).share == pytest.approx(9 / 25)


def test_a_scale_grows_where_values_outgrow_it_and_stays_elsewhere() -> None:
    scales = torch.full((1, 2, 2), 1 / 128)
    values = torch.ones(32, 32)
    values[0, 20] = 9.0  # 448 / 128 is 3.5
    rounding = BlockScales(scales, (16, 16), torch.bfloat16)
    rounding.measure(values[:10], 0, 0)
    rounding.measure(values[10:], 0, 10)
    new = rounding.new
    assert new[0, 0, 1] >= 9.0 / 448
    assert torch.equal(new, new.bfloat16().float())  # exactly what the checkpoint can hold
    assert (new == scales).sum() == 3
    codes, held = rounding.quantize(values[10:], 0, 10)
    assert codes.dtype == fp8.CODES
    assert torch.equal(held, fp8.dequantize_rows(codes, new[0], (16, 16), 10, torch.float32))
