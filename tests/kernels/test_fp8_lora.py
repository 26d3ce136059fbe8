"""LoRA on a float8 base in one operator, against the frozen product and the low-rank one apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardtune.kernels import fp8
from shardtune.kernels.fp8_lora import fp8_lora_linear
from shardtune.kernels.fp8_operators import linear, round_for

BLOCKS = {"row": (1, 64), "matrix": (48, 64), "fine": (16, 16)}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(
    x: Tensor, codes: Tensor, scale: Tensor, block: fp8.Block, bias: Tensor | None, a: Tensor, b: Tensor,
    scaling: float, dropped: Tensor | None, fp8_compute: bool,
) -> Tensor:  # fmt: skip
    low = F.linear(F.linear(x if dropped is None else dropped, a), b) * scaling
    return linear(x, codes, scale, block, bias, fp8_compute) + low


def gradients(
    function: object, shape: tuple[int, ...], block: fp8.Block, *, bias: bool, dropout: bool, codes_too: bool,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:  # fmt: skip
    codes = (draw(48, 64, seed=1) * 100).to(fp8.CODES)
    scale = draw(*fp8.scale_shape((48, 64), block), seed=2).abs() * 0.01
    x = draw(*shape, seed=3, dtype=dtype)
    leaves = [x, draw(4, 64, seed=4, dtype=dtype), draw(48, 4, seed=5, dtype=dtype)]
    if dropout:
        leaves.append(x * (draw(*shape, seed=6) > 0) / 0.5)
    plus = draw(48, seed=7, dtype=dtype).requires_grad_() if bias else None
    x, a, b, *rest = (leaf.requires_grad_() for leaf in leaves)
    out = function(x, codes, scale, block, plus, a, b, 0.7, rest[0] if rest else None, codes_too)  # type: ignore[operator]
    out.backward(draw(*out.shape, seed=8, dtype=dtype))
    return [out.detach(), *(leaf.grad for leaf in (*leaves, plus) if leaf is not None)]  # type: ignore[misc]


@pytest.mark.parametrize("codes_too", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_it_computes_what_the_two_products_apart_compute(
    codes_too: bool, bias: bool, dropout: bool, block: fp8.Block
) -> None:
    how = {"bias": bias, "dropout": dropout, "codes_too": codes_too}
    for shape in ((6, 64), (2, 3, 64)):
        fused, apart = (gradients(f, shape, block, **how) for f in (fp8_lora_linear, reference))
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(fused, apart, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplying_codes_leaves_adapters_their_precision(dtype: torch.dtype) -> None:
    rounded, exact = (
        gradients(fp8_lora_linear, (32, 64), (1, 64), bias=False, dropout=False, codes_too=codes_too, dtype=dtype)
        for codes_too in (True, False)
    )
    for index, (one, other) in enumerate(zip(rounded, exact, strict=True)):
        distance = ((one.float() - other.float()).norm() / other.float().norm()).item()
        # The output and x's gradient are rounded; A's and B's come from what was not.
        assert 5e-3 < distance < 4e-2 if index < 2 else distance == 0


def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    codes, scale = (draw(48, 64, seed=1) * 100).to(fp8.CODES), draw(48, 1, seed=2).abs()
    x, a, b = (draw(*shape, seed=3) for shape in ((6, 64), (4, 64), (48, 4)))
    found = torch.library.opcheck(
        torch.ops.shardtune.fp8_lora_linear,
        (x, *round_for(x, codes, (1, 64), True), None, codes, scale, 1, 64, None, a, b, 0.5),
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )
    assert set(found.values()) == {"SUCCESS"} and len(found) == 2
