"""Routed experts as grouped products mean what a loop over experts means, in outputs and in every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardtune.kernels import fp8
from shardtune.kernels.experts import ExpertWeight, routed_experts, routed_experts_reference
from shardtune.kernels.grouped import grouped_product_works

EXPERTS = 6


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    left, right = gate_up.chunk(2, dim=-1)
    return F.silu(left) * right


def weight(out: int, into: int, rank: int, *, kind: str, dtype: torch.dtype) -> ExpertWeight:
    values = torch.randn(EXPERTS, out, into) / into**0.5
    a, b = torch.randn(EXPERTS, rank, into) / into**0.5, torch.randn(EXPERTS, out, rank)
    if kind == "fp8":
        block = (16, 16)
        scale = torch.rand(fp8.scale_shape(values.shape, block)) / 400 + 1e-4
        held = ExpertWeight((values * 200).to(fp8.CODES), scale, block)
    else:
        held = ExpertWeight(values.to(dtype))
    return replace(held, lora_a=a.requires_grad_(), lora_b=b.requires_grad_(), scaling=0.5) if rank else held


def routing(tokens: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert 0 and the last get no token at all, expert 1 most of them."""
    rows = [[1, *(torch.randperm(EXPERTS - 3)[: k - 1] + 2).tolist()] for _ in range(tokens)]
    return torch.tensor(rows), torch.rand(tokens, k)


def outputs_and_gradients(function: object, parts: tuple, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x, index, weights, gate_up, down = parts
    leaves = {"x": x, "router": weights}
    for name, of in (("gate_up", gate_up), ("down", down)):
        leaves |= {f"{name}.{f}": getattr(of, f) for f in ("lora_a", "lora_b") if getattr(of, f) is not None}
    for leaf in leaves.values():
        leaf.requires_grad_().grad = None
    y = function(x, index, weights, gate_up, down, gate)  # type: ignore[operator]
    assert y.dtype == dtype
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def parts(dtype: torch.dtype, *, kind: str = "plain", ranks: tuple[int, int] = (4, 3), hidden: int = 32) -> tuple:
    torch.manual_seed(0)
    x = torch.randn(11, hidden).to(dtype)
    index, weights = routing(11, 2)
    gate_up = weight(48, hidden, ranks[0], kind=kind, dtype=dtype)
    return x, index, weights, gate_up, weight(hidden, 24, ranks[1], kind=kind, dtype=dtype)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("ranks", [(0, 0), (4, 0), (0, 3), (16, 3)])
def test_outputs_and_gradients_equal_the_loops_in_float32(kind: str, ranks: tuple[int, int]) -> None:
    given = parts(torch.float32, kind=kind, ranks=ranks)
    fast = outputs_and_gradients(routed_experts, given, torch.float32)
    slow = outputs_and_gradients(routed_experts_reference, given, torch.float32)
    assert fast.keys() == slow.keys() and len(fast) == 3 + 2 * sum(r > 0 for r in ranks)
    for name in fast:
        assert distance(fast[name], slow[name]) < 2e-6, name


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("ranks", [(8, 16), (3, 5)])
def test_bf16_stays_within_rounding_of_float32(kind: str, ranks: tuple[int, int]) -> None:
    given = parts(torch.bfloat16, kind=kind, ranks=ranks)
    exact = outputs_and_gradients(
        routed_experts_reference, (given[0].detach().float(), *given[1:]), torch.float32
    )  # the same bf16 weights
    fast = outputs_and_gradients(routed_experts, given, torch.bfloat16)
    slow = outputs_and_gradients(routed_experts_reference, given, torch.bfloat16)
    for name in fast:
        # Both round what is between two products; they add up in another order.
        assert distance(fast[name], exact[name]) < 2 * distance(slow[name], exact[name]) + 4e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_no_grouped_product_takes_go_expert_by_expert(dtype: torch.dtype) -> None:
    given = parts(dtype, hidden=30)
    assert not grouped_product_works(given[0], *given[3].weight.shape[1:])
    fast = outputs_and_gradients(routed_experts, given, dtype)
    slow = outputs_and_gradients(routed_experts_reference, given, dtype)
    for name in fast:
        assert distance(fast[name], slow[name]) < (1e-5 if dtype == torch.float32 else 2e-2), name


def test_values_are_those_computed_by_hand() -> None:
    # Two experts of one hidden unit, activation left out. Token 1: 3·(2·1)=6 through expert 0 with weight 0.25; token 2:
    # expert 1 has codes 2 and 4 with scales 0.5 and 10, an adapter 0.5·(3·1) on the first: (1+1.5)·40 = 100 per unit.
    codes = torch.tensor([2.0, 2.0]).view(2, 1, 1).to(fp8.CODES)
    up = ExpertWeight(
        codes, torch.tensor([1.0, 0.5]).view(2, 1, 1), (1, 1),
        torch.tensor([0.0, 1.0]).view(2, 1, 1), torch.tensor([7.0, 3.0]).view(2, 1, 1), 0.5,
    )  # fmt: skip
    down = ExpertWeight(
        torch.tensor([3.0, 4.0]).view(2, 1, 1).to(fp8.CODES), torch.tensor([1.0, 10.0]).view(2, 1, 1), (1, 1)
    )
    y = routed_experts(
        torch.tensor([[1.0], [1.0]]), torch.tensor([[0], [1]]), torch.tensor([[0.25], [1.0]]), up, down, lambda h: h
    )
    assert y.tolist() == [[1.5], [100.0]]


@pytest.mark.parametrize("hidden", [32, 30], ids=["grouped", "one by one"])
def test_an_expert_without_tokens_gets_a_gradient_of_exactly_zero(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parts(torch.bfloat16, hidden=hidden)
    plain = F.grouped_mm

    def leaves_empty_groups_as_they_were(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = plain(a, b, offs=offs)
        if a.dim() == b.dim() == 2:
            out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", leaves_empty_groups_as_they_were)
    gradients = outputs_and_gradients(routed_experts, given, torch.bfloat16)
    assert not (given[1] == 0).any()
    for name in ("gate_up.lora_a", "gate_up.lora_b", "down.lora_a", "down.lora_b"):
        assert gradients[name][0].abs().max() == 0
        assert gradients[name][1].abs().max() > 0


def test_no_tokens_at_all_is_no_error() -> None:
    x, index, weights, gate_up, down = parts(torch.float32)
    gradients = outputs_and_gradients(
        routed_experts, (x.detach()[:0], index[:0], weights.detach()[:0], gate_up, down), torch.float32
    )
    assert gradients["y"].shape == (0, 32) and gradients["down.lora_a"].abs().max() == 0


def test_no_tensor_of_all_experts_size_is_made_or_kept_beside_the_weights() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    given = parts(torch.float32, ranks=(2, 2))
    held = {of.weight.untyped_storage().data_ptr() for of in given[3:]}
    sizes: list[int] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in held:
                sizes.append(out.numel())
            return out

    with Made():
        outputs_and_gradients(routed_experts, given, torch.float32)
    assert 0 < max(sizes) < given[4].weight.numel() / 2


def test_codes_and_not_their_values_are_kept_for_backward() -> None:
    given = parts(torch.bfloat16, kind="fp8")
    held = {given[3].weight.data_ptr(), given[4].weight.data_ptr()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs_and_gradients(routed_experts, given, torch.bfloat16)
    large = [t for t in kept if t.numel() >= given[4].weight.numel()]
    assert {t.data_ptr() for t in large} == held


def test_a_base_weight_that_trains_gets_its_gradient() -> None:
    given = parts(torch.float32)
    gradients = []
    for function in (routed_experts, routed_experts_reference):
        base = given[3].weight.clone().requires_grad_()
        function(*given[:3], replace(given[3], weight=base), given[4], gate).square().sum().backward()
        gradients.append(base.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_codes_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="scales"):
        ExpertWeight(torch.zeros(2, 4, 4).to(fp8.CODES))


@pytest.mark.parametrize("fp8_compute", [False, True])
def test_compiled_experts_keep_codes_for_backward_and_no_values(fp8_compute: bool) -> None:
    """Traced, dequantising forward and backward is one node of the graph, and its result is kept between them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    gate_up, down = (
        ExpertWeight(*fp8.quantize_rows(torch.randn(8, out, into)), (1, into), fp8_compute=fp8_compute)
        for out, into in ((64, 48), (48, 32))
    )
    index, weights = torch.randint(0, 8, (16, 2)), torch.rand(16, 2).bfloat16()
    x = torch.randn(16, 48).bfloat16().requires_grad_()
    compiled = torch.compile(
        lambda x: routed_experts(x, index, weights, gate_up, down, lambda h: h[:, :32] * h[:, 32:]),
        fullgraph=True,
        backend="aot_eager_decomp_partition",  # what is kept is chosen as for the real compiler
    )
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compiled(x).sum().backward()
    weights_kept = [t.dtype for t in kept if t.numel() >= gate_up.weight.numel() // 2]
    assert weights_kept and set(weights_kept) == {fp8.CODES}
