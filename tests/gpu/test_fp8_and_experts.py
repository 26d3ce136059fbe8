"""FP8 weights and routed experts on a GPU: the twins' values and gradients, FSDP2's gather, and no second copy of a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from expert_toys import ATTENTION, adapted, distance, fp8_and_its_twin, loss_and_gradients, token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from shardtune.adapters.experts import use_grouped_products
from shardtune.config.schema import ParallelSection
from shardtune.kernels import fp8
from shardtune.kernels.experts import ExpertWeight, routed_experts, routed_experts_reference
from shardtune.kernels.fp8_operators import linear
from shardtune.parallel.mesh import Mesh
from shardtune.parallel.shard import shard_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match"),
]
BLOCKS = {"tensor": (300, 208), "row": (1, 208), "ragged": (128, 128)}


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    left, right = gate_up.chunk(2, dim=-1)
    return F.silu(left) * right


def expert_weight(experts: int, out: int, into: int, rank: int, *, held: bool) -> ExpertWeight:
    values = torch.randn(experts, out, into, device="cuda") / into**0.5
    codes, scale = fp8.quantize_rows(values)
    weight = ExpertWeight(codes, scale, (1, into)) if held else ExpertWeight(values.bfloat16())
    a = torch.randn(experts, rank, into, device="cuda") / into**0.5
    b = torch.randn(experts, out, rank, device="cuda") / rank**0.5
    return replace(weight, lora_a=a, lora_b=b, scaling=0.5)


def outputs_and_gradients(
    function: object, x: torch.Tensor, weights: torch.Tensor, *rest: object
) -> list[torch.Tensor]:
    index, gate_up, down = rest
    assert isinstance(gate_up, ExpertWeight) and isinstance(down, ExpertWeight)
    leaves = [
        t.clone().requires_grad_() for t in (x, weights, gate_up.lora_a, gate_up.lora_b, down.lora_a, down.lora_b)
    ]
    gate_up, down = (
        replace(gate_up, lora_a=leaves[2], lora_b=leaves[3]),
        replace(down, lora_a=leaves[4], lora_b=leaves[5]),
    )
    y = function(leaves[0], index, leaves[1], gate_up, down, gate)  # type: ignore[operator]
    (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_values_are_those_of_the_cpu_bit_for_bit(block: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codes = (torch.randn(3, 300, 208) * 30).to(fp8.CODES)
    scale = torch.rand(fp8.scale_shape(codes.shape, block)) * 0.01
    on_gpu = fp8.dequantize(codes.cuda(), scale.cuda(), block, dtype)
    assert torch.equal(on_gpu.cpu(), fp8.dequantize(codes, scale, block, dtype))
    rows = fp8.dequantize_rows(codes[:, 100:250].cuda(), scale.cuda(), block, 100, dtype)
    assert torch.equal(rows, on_gpu[:, 100:250])


def test_codes_made_on_the_gpu_are_those_of_the_cpu_but_for_ties() -> None:
    """A quotient that lies on the edge between two codes may fall to either side: the GPU divides by multiplying."""
    torch.manual_seed(0)
    weight = torch.randn(4, 64, 96).bfloat16()
    (codes, scale), (expected, expected_scale) = fp8.quantize_rows(weight.cuda()), fp8.quantize_rows(weight)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-6, atol=0)
    steps = codes.cpu().view(torch.uint8).int() - expected.view(torch.uint8).int()
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_linear_product_and_its_gradient_equal_the_twins(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codes = (torch.randn(300, 208, device="cuda") * 30).to(fp8.CODES)
    scale = torch.rand(fp8.scale_shape(codes.shape, (128, 128)), device="cuda") * 0.01
    results = []
    for fast in (True, False):
        torch.manual_seed(1)
        x = torch.randn(7, 208, device="cuda", dtype=dtype, requires_grad=True)
        weight = fp8.dequantize(codes, scale, (128, 128), dtype)
        y = linear(x, codes, scale, (128, 128)) if fast else F.linear(x, weight)
        y.square().sum().backward()
        results.append((y, x.grad))
    for mine, twins in zip(*results, strict=True):
        assert distance(mine, twins) < 1e-5


@pytest.mark.parametrize("held", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("ranks", [(16, 8), (4, 3)])
def test_routed_experts_stay_within_rounding_of_the_loop_in_float32(held: bool, ranks: tuple[int, int]) -> None:
    torch.manual_seed(0)
    # Groups of odd sizes, and experts 0 and 7 with no token at all.
    index = torch.stack([torch.randperm(6)[:2] + 1 for _ in range(333)]).cuda()
    weights = torch.rand(333, 2, device="cuda")
    gate_up, down = expert_weight(8, 256, 128, ranks[0], held=held), expert_weight(8, 128, 128, ranks[1], held=held)
    x = torch.randn(333, 128, device="cuda").bfloat16()
    # Memory full of NaN, so that a product that leaves a part of its output unwritten shows.
    del [torch.full((1 << 26,), torch.nan, device="cuda") for _ in range(2)][:]
    fast = outputs_and_gradients(routed_experts, x, weights, index, gate_up, down)
    exact = outputs_and_gradients(routed_experts_reference, x.float(), weights, index, gate_up, down)
    slow = outputs_and_gradients(routed_experts_reference, x, weights, index, gate_up, down)
    for mine, reference, loops in zip(fast, exact, slow, strict=True):
        assert distance(mine, reference) < 2 * distance(loops, reference) + 4e-3
    for gradient in fast[3:]:
        assert gradient[[0, 7]].abs().max() == 0 and gradient[1].abs().max() > 0


def test_routed_experts_in_float32_equal_the_loop() -> None:
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(6)[:2] + 1 for _ in range(77)]).cuda()
    weights = torch.rand(77, 2, device="cuda")
    gate_up, down = expert_weight(8, 64, 32, 4, held=True), expert_weight(8, 32, 32, 3, held=True)
    x = torch.randn(77, 32, device="cuda")
    fast = outputs_and_gradients(routed_experts, x, weights, index, gate_up, down)
    slow = outputs_and_gradients(routed_experts_reference, x, weights, index, gate_up, down)
    assert all(distance(mine, loops) < 1e-5 for mine, loops in zip(fast, slow, strict=True))


def test_the_same_tokens_give_the_same_bits_twice() -> None:
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(8)[:4] for _ in range(512)]).cuda()
    weights = torch.rand(512, 4, device="cuda")
    gate_up, down = expert_weight(8, 256, 128, 16, held=True), expert_weight(8, 128, 128, 16, held=True)
    x = torch.randn(512, 128, device="cuda").bfloat16()
    once, again = (outputs_and_gradients(routed_experts, x, weights, index, gate_up, down) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_one_weight_at_a_time_is_dequantised_and_none_is_kept() -> None:
    torch.manual_seed(0)
    index = torch.randint(0, 64, (64, 2), device="cuda")
    weights = torch.rand(64, 2, device="cuda")
    gate_up, down = expert_weight(64, 1024, 1024, 8, held=True), expert_weight(64, 1024, 512, 8, held=True)
    x = torch.randn(64, 1024, device="cuda").bfloat16().requires_grad_()
    one = 2 * gate_up.weight.numel()  # the larger weight in bf16: 134 MB
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = routed_experts(x, index, weights, gate_up, down, gate)
    assert torch.cuda.memory_allocated() - before < 0.2 * one
    y.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1.2 * one


@pytest.fixture
def alone() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["mistral4", "mixtral"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_sharded_fp8_model_trains_as_its_dequantised_twin(kind: str, reshard: bool, alone: None) -> None:
    whole = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    mesh = Mesh(1, 1, (0,), whole, whole)
    results = []
    for held, base in zip((True, False), fp8_and_its_twin(kind, torch.bfloat16), strict=True):
        model = adapted(base, ATTENTION[kind]).cuda()
        assert use_grouped_products(model) == 4
        shard_model(model, ParallelSection(reshard_after_forward=reshard), mesh, torch.bfloat16)
        seen: set[tuple[torch.dtype, bool]] = set()
        attention = next(m for n, m in model.named_modules() if n.endswith("layers.1.self_attn"))
        projection = attention.o_proj.base_layer if kind == "mistral4" else attention.o_proj
        projection.register_forward_pre_hook(
            lambda m, _, s=seen: s.add(
                (m.weight.dtype, getattr(m, "weight_scale_inv", m.weight).dtype == torch.float32)
            )
        )
        loss, gradients = loss_and_gradients(model, token_ids().cuda())
        results.append((loss, {name: g.full_tensor() for name, g in gradients.items()}))
        assert seen == ({(fp8.CODES, True)} if held else {(torch.bfloat16, False)})
    (loss, gradients), (twin_loss, twins) = results
    assert abs(loss - twin_loss) < 1e-2
    for name, gradient in twins.items():
        assert gradient.abs().max() > 0 and distance(gradients[name], gradient) < 2e-2, name
