"""Products of float8 codes: what rounding costs, that gradients are those of the rounded product, what stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from shardtune.kernels import fp8, fp8_products
from shardtune.kernels.fp8_operators import grouped_linear, linear, round_for

# What checkpoints have: a scale for each row, for several rows, for the matrix, and blocks that torch has a product for.
BLOCKS = {"row": (1, 512), "rows": (48, 512), "matrix": (512, 512), "larger": (600, 600), "blocks": (128, 128)}

# Its fourth check compares arguments before and after, which it cannot do with float8.
CHECKS = ("test_faketensor", "test_aot_dispatch_dynamic")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(got: Tensor, meant: Tensor) -> float:
    return ((got.float() - meant.float()).norm() / meant.float().norm()).item()


def held(*shape: int, block: tuple[int, int], seed: int = 1) -> tuple[Tensor, Tensor]:
    codes = (draw(*shape, seed=seed) * 100).clamp(-448, 448).to(fp8.CODES)
    return codes, draw(*fp8.scale_shape(codes.shape, block), seed=5).abs() * 0.01 + 0.001


def by_hand(x: Tensor, width: int) -> Tensor:
    """Rounded piece by piece: the largest of `width` elements is 448 units, the others the nearest code."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], width):
            piece = x[row, start : start + width]
            unit = piece.abs().max() / 448
            out[row, start : start + width] = (piece / unit).to(fp8.CODES).float() * unit
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_linear_layer_is_off_by_the_rounding_of_its_activations_alone(
    block: tuple[int, int], dtype: torch.dtype
) -> None:
    codes, scale = held(512, 512, block=block)
    x, twin = (draw(2, 3, 512, seed=2).to(dtype).requires_grad_() for _ in range(2))
    bias = draw(512, seed=4).to(dtype)
    got = linear(x, codes, scale, block, bias, fp8_compute=True)
    meant = linear(twin, codes, scale, block, bias)
    assert 5e-3 < off(got, meant) < 4e-2
    pull = draw(*got.shape, seed=3).to(dtype)
    got.backward(pull)
    meant.backward(pull)
    assert x.grad is not None and twin.grad is not None
    assert 5e-3 < off(x.grad, twin.grad) < 4e-2


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_what_is_multiplied_are_the_codes_nearest_to_the_activations(block: tuple[int, int]) -> None:
    codes, scale = held(512, 512, block=block)
    weight = fp8.dequantize(codes, scale, block, torch.float32)
    width = 128 if block == (128, 128) else 512
    x, grad = draw(5, 512, seed=2), draw(5, 512, seed=3)
    got = fp8_products.product(x, *fp8_products.rounded(x, width), codes, scale, block)
    # A quotient on the edge between two codes may fall to either side; nothing else may differ.
    assert off(got, by_hand(x, width) @ weight.T) < 1e-3
    back = fp8_products.product_back(grad, codes, scale, block, True)
    if width == 128:
        assert off(back, by_hand(grad, 128) @ weight) < 1e-3
    else:  # the weight's scales are in the gradient before it is rounded
        rows = scale[:, :1].repeat_interleave(min(block[0], 512), 0)[:512]
        assert off(back, by_hand(grad * rows.T, 512) @ codes.float()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(1, 32), (16, 32), (48, 32), (20, 32)])
def test_groups_of_any_size_agree_with_the_dequantised_ones(block: tuple[int, int], dtype: torch.dtype) -> None:
    codes, scale = held(5, 48, 32, block=block)
    ends = torch.tensor([3, 3, 10, 12, 12], dtype=torch.int32)  # two groups without rows
    x, twin = (draw(12, 32, seed=2).to(dtype).requires_grad_() for _ in range(2))
    got = grouped_linear(x, codes, scale, block, ends, fp8_compute=True)
    weight = fp8.dequantize(codes, scale, block, torch.float32)
    group = torch.searchsorted(ends, torch.arange(12, dtype=torch.int32), right=True)
    meant = torch.einsum("ni,noi->no", twin.float(), weight[group])
    assert 5e-3 < off(got, meant) < 4e-2
    pull = draw(12, 48, seed=3)
    got.backward(pull.to(dtype))
    meant.backward(pull)
    assert x.grad is not None and twin.grad is not None
    assert 5e-3 < off(x.grad, twin.grad) < 4e-2


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((64, 60), (1, 60)),
        ((60, 64), (1, 64)),
        ((64, 64), (32, 32)),
        ((640, 512), (128, 128)),
        ((2, 512, 512), (128, 128)),
    ],
)
def test_scales_or_sizes_the_units_do_not_take_are_dequantised_and_lose_nothing(
    shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    assert fp8_products.why_not(shape, block) is not None
    codes, scale = held(*shape, block=block)
    x, pull = draw(6, shape[-1], seed=2), draw(6, shape[-2], seed=3)
    results = []
    for asked in (True, False):
        own = x.clone().requires_grad_()
        if len(shape) == 2:
            y = linear(own, codes, scale, block, fp8_compute=asked)
        else:
            y = grouped_linear(own, codes, scale, block, torch.tensor([4, 6], dtype=torch.int32), fp8_compute=asked)
        y.backward(pull)
        results.append((y, own.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = fp8_products.rounded(torch.zeros(2, 32), 16)
    assert not codes.float().any() and scale.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_tie_falls_to_the_even_code() -> None:
    """Half-precision values meet ties: by 448 / 3.9375, rounded once, these are 68, -21 and 100."""
    row = torch.tensor([[3.9375, 0.59765625, -0.1845703125, 0.87890625]], dtype=torch.bfloat16)
    codes, scale = fp8_products.rounded(row, 4)
    assert codes.float().tolist() == [[448.0, 64.0, -20.0, 96.0]] and scale.item() == 3.9375 / 448


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_come_out_as_a_number(bad: float) -> None:
    codes, scale = held(32, 32, block=(1, 32))
    x = draw(3, 32)
    x[1, 5] = bad
    y = fp8_products.product(x, *fp8_products.rounded(x, 32), codes, scale, (1, 32))
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def test_codes_are_transposed_matrix_by_matrix() -> None:
    codes = fp8.quantize_rows(draw(3, 5, 7))[0]
    turned = fp8_products.transposed(codes)
    assert turned.is_contiguous() and torch.equal(turned.float(), codes.float().transpose(-2, -1))


@pytest.mark.parametrize("fp8_compute", [True, False])
def test_nothing_but_codes_and_scales_is_kept_for_backward(fp8_compute: bool) -> None:
    codes, scale = held(4, 64, 32, block=(64, 32))
    ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(draw(8, 32).requires_grad_(), codes, scale, (64, 32), ends, fp8_compute)
    assert {t.data_ptr() for t in kept} == {codes.data_ptr(), scale.data_ptr(), ends.data_ptr()}


@pytest.mark.parametrize("fp8_compute", [True, False])
def test_torch_finds_nothing_wrong_with_the_operators(fp8_compute: bool) -> None:
    block = (1, 32)
    codes, scale = held(48, 32, block=block)
    x, bias = draw(6, 32), draw(48)
    linear_found = torch.library.opcheck(
        torch.ops.shardtune.fp8_linear,
        (x, *round_for(x, codes, block, fp8_compute), codes, scale, *block, bias),
        test_utils=CHECKS,
    )
    codes, scale = held(4, 48, 32, block=block)
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    grouped_found = torch.library.opcheck(
        torch.ops.shardtune.fp8_grouped_linear,
        (draw(8, 32), codes, scale, *block, ends, fp8_compute),
        test_utils=CHECKS,
    )
    assert linear_found == grouped_found == dict.fromkeys(CHECKS, "SUCCESS")


@pytest.mark.parametrize("width", [32, 8])
def test_torch_finds_nothing_wrong_with_rounding_by_itself(width: int) -> None:
    found = torch.library.opcheck(torch.ops.shardtune.fp8_round, (draw(6, 32), width), test_utils=CHECKS)
    assert found == dict.fromkeys(CHECKS, "SUCCESS")


@pytest.mark.parametrize("fp8_compute", [True, False])
def test_compiled_layers_that_read_the_same_round_it_once(fp8_compute: bool) -> None:
    weights = [held(32, 32, block=(1, 32), seed=seed) for seed in (1, 2, 3)]
    ran: list[Any] = []

    def look(graph: Any, _: object) -> Any:
        ran.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def read(x: Tensor) -> Tensor:
        return sum((linear(x, *weight, (1, 32), fp8_compute=fp8_compute) for weight in weights), x)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition)
    one, other = (draw(6, 32).requires_grad_() for _ in range(2))
    mine, meant = torch.compile(read, backend=backend)(one), read(other)
    mine.sum().backward()
    meant.sum().backward()
    assert torch.equal(mine, meant) and torch.equal(one.grad, other.grad)
    assert ran.count(torch.ops.shardtune.fp8_round.default) == (1 if fp8_compute else 0)
    assert ran.count(torch.ops.shardtune.fp8_linear.default) == 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fp8_compute", [True, False])
def test_a_compiled_layer_holds_them_whole_and_is_not_compiled_again_for_other_groups(
    backend: str, fp8_compute: bool
) -> None:
    torch._dynamo.reset()
    block = (1, 32)
    codes, scale = held(4, 32, 32, block=block)
    matrix, its_scale = held(32, 32, block=block, seed=8)

    def layer(x: Tensor, ends: Tensor) -> Tensor:
        hidden = torch.nn.functional.silu(linear(x, matrix, its_scale, block, fp8_compute=fp8_compute))
        return grouped_linear(hidden, codes, scale, block, ends, fp8_compute) * 2

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for number, bounds in enumerate(([2, 4, 6, 8], [0, 0, 8, 8], [8, 8, 8, 8])):
        ends = torch.tensor(bounds, dtype=torch.int32)
        x, twin = (draw(8, 32, seed=number).requires_grad_() for _ in range(2))
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            got = compiled(x, ends)
        meant = layer(twin, ends)
        got.sum().backward()
        meant.sum().backward()
        assert torch.allclose(got, meant, rtol=1e-3, atol=1e-4)
        assert off(x.grad, twin.grad) < 1e-2  # type: ignore[arg-type]
