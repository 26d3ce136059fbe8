"""The fused operators against their twins: same values, same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardtune.kernels.lora import lora_linear, lora_linear_reference


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(function: object, x: Tensor, rest: tuple, dropped: Tensor | None) -> tuple[Tensor, ...]:
    weight, bias, a, b, scaling = rest
    leaves = [t.clone().requires_grad_() if t is not None else None for t in (x, bias, a, b, dropped)]
    own_x, own_bias, own_a, own_b, own_dropped = leaves
    out = function(own_x, weight, own_bias, own_a, own_b, scaling, own_dropped)  # type: ignore[operator]
    (out * draw(*out.shape, seed=9, dtype=out.dtype)).sum().backward()
    return (out.detach(), *(leaf.grad for leaf in leaves if leaf is not None))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)])
def test_it_computes_what_peft_computes(bias: bool, dropout: bool, shape: tuple[int, ...]) -> None:
    x = draw(*shape, seed=1)
    rest = (draw(7, 12, seed=2), draw(7, seed=3) if bias else None, draw(4, 12, seed=4), draw(7, 4, seed=5), 0.7)
    dropped = x * (draw(*shape, seed=6) > 0) / 0.5 if dropout else None
    for got, meant in zip(
        gradients(lora_linear, x, rest, dropped), gradients(lora_linear_reference, x, rest, dropped), strict=True
    ):
        assert torch.allclose(got, meant, rtol=1e-12, atol=1e-12)


def test_in_bfloat16_it_is_as_near_to_the_truth_as_its_twin() -> None:
    x, rest = draw(64, 96, seed=1), (draw(80, 96, seed=2), None, draw(8, 96, seed=4), draw(80, 8, seed=5), 0.5)
    truth = gradients(lora_linear_reference, x, rest, None)
    half = tuple(t.bfloat16() if isinstance(t, Tensor) else t for t in rest)
    for function in (lora_linear, lora_linear_reference):
        for got, meant in zip(gradients(function, x.bfloat16(), half, None), truth, strict=True):
            assert (got.double() - meant).norm() <= 1e-2 * meant.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_code_can_hold_it(bias: bool) -> None:
    x = draw(6, 12, seed=1)
    rest = (draw(7, 12, seed=2), draw(7, seed=3) if bias else None, draw(4, 12, seed=4), draw(7, 4, seed=5), 0.7)
    compiled = torch.compile(lora_linear, fullgraph=True, backend="aot_eager")
    for got, meant in zip(gradients(compiled, x, rest, None), gradients(lora_linear, x, rest, None), strict=True):
        assert torch.equal(got, meant)
