"""Products of float8 codes on a GPU: torch's own float8 kernels against the eager twin and against dequantised weights."""

from __future__ import annotations

import pytest
import torch
from expert_toys import distance, loss_and_gradients
from fp8_compute_toys import IDS, TARGETS, chosen_experts, prepared
from torch import Tensor

from shardtune.kernels import fp8, fp8_products
from shardtune.kernels.fp8_lora import fp8_lora_linear
from shardtune.kernels.fp8_operators import grouped_linear, linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or fp8_products.missing_units(torch.device("cuda")) is not None,
        reason="needs a GPU that multiplies float8",
    ),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match"),
]
BLOCKS = {"row": (1, 512), "rows": (48, 512), "matrix": (1024, 512), "blocks": (128, 128)}
# (tokens in each group): even ones, odd ones with empty groups between, and none but in the last
GROUPS = {"even": [64] * 8, "odd": [0, 1, 17, 0, 333, 130, 31, 0], "last": [0] * 7 + [512]}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def held(*shape: int, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    codes = (draw(*shape, seed=1) * 100).clamp(-448, 448).to(fp8.CODES)
    return codes, draw(*fp8.scale_shape(codes.shape, block), seed=5).abs() * 0.01 + 0.001


def gradients(function: object, *leaves: Tensor) -> list[Tensor]:
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*own)  # type: ignore[operator]
    out.backward(draw(*out.shape, seed=9).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in own)]  # type: ignore[misc]


def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "_on_units", lambda *_, **__: False)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_linear_layer_equals_its_twin_and_stays_near_the_dequantised_one(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scale = held(1024, 512, block=block)
    x = draw(3, 84, 512, seed=2).bfloat16()
    fast = gradients(lambda x: linear(x, codes, scale, block, fp8_compute=True), x)
    plain = gradients(lambda x: linear(x, codes, scale, block), x)
    without_units(monkeypatch)
    twin = gradients(lambda x: linear(x, codes, scale, block, fp8_compute=True), x)
    for one, other, near in zip(fast, twin, plain, strict=True):
        assert distance(one, other) < 1e-2
        assert 5e-3 < distance(one, near) < 4e-2


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_lora_on_it_equals_its_twin(block: tuple[int, int], dropout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = held(1024, 512, block=block)
    x, a, b = (draw(*shape, seed=2).bfloat16() for shape in ((252, 512), (16, 512), (1024, 16)))
    bias, dropped = draw(1024, seed=3).bfloat16(), x * (draw(252, 512, seed=4) > 0) if dropout else None

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return fp8_lora_linear(x, codes, scale, block, bias, a, b, 0.5, dropped, True)

    fast = gradients(run, x, a, b)
    without_units(monkeypatch)
    assert all(distance(one, other) < 1e-2 for one, other in zip(fast, gradients(run, x, a, b), strict=True))


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("block", [(1, 256), (512, 256)])
def test_groups_of_any_size_equal_their_twin(
    sizes: list[int], block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scale = held(8, 512, 256, block=block)
    ends = torch.tensor(sizes).cumsum(0).int().cuda()
    x = draw(512, 256, seed=2).bfloat16()
    del [torch.full((1 << 26,), torch.nan, device="cuda") for _ in range(2)][:]  # what is left unwritten shows
    fast = gradients(lambda x: grouped_linear(x, codes, scale, block, ends, True), x)
    plain = gradients(lambda x: grouped_linear(x, codes, scale, block, ends, False), x)
    without_units(monkeypatch)
    twin = gradients(lambda x: grouped_linear(x, codes, scale, block, ends, True), x)
    for one, other, near in zip(fast, twin, plain, strict=True):
        assert distance(one, other) < 1e-2
        assert 5e-3 < distance(one, near) < 4e-2


@pytest.mark.parametrize("compiled", [None, "inductor"])
@pytest.mark.parametrize("kind", TARGETS)
def test_loss_routing_and_every_gradient_of_a_model_stay_near_the_dequantised_twin(
    kind: str, compiled: str | None
) -> None:
    results = []
    for codes_too in (True, False):
        model = prepared(kind, torch.bfloat16, codes_too=codes_too).cuda()
        experts = chosen_experts(model) if compiled is None else []
        if compiled is not None:
            torch._dynamo.reset()
            for layer in model.get_base_model().model.layers:
                layer.forward = torch.compile(layer.forward, backend=compiled)
        results.append((*loss_and_gradients(model, IDS.cuda()), experts))
    (loss, mine, experts), (twin_loss, twins, twin_experts) = results
    assert abs(loss - twin_loss) < 5e-2 * twin_loss
    for name, gradient in twins.items():
        assert gradient.abs().max() > 0 and distance(mine[name], gradient) < 5e-2, name
    assert all(map(torch.equal, experts, twin_experts))


def test_backward_of_experts_needs_less_memory_than_their_values() -> None:
    codes, scale = held(16, 2048, 1024, block=(1, 1024))
    ends = torch.full((16,), 16).cumsum(0).int().cuda()
    x = draw(256, 1024, seed=2).bfloat16().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grouped_linear(x, codes, scale, (1, 1024), ends, True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * codes.numel()  # in bf16 they would be twice the codes
