"""FP8 weights and expert adapters in shards: gathered bit for bit, and the gradients of one unsharded model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_toys import ATTENTION, adapted, distance, fp8_and_its_twin, loss_and_gradients
from fp8_worker import CASES, batch
from ranks import on_ranks

WORKER = Path(__file__).parent / "fp8_worker.py"

pytestmark = pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
Ranks = list[dict[str, Any]]


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def ranks(
    request: pytest.FixtureRequest, shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    out = tmp_path_factory.mktemp(f"{request.param}-ranks")
    on_ranks(shared_environment, WORKER, request.param, out, timeout=200)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(request.param)]


@cache
def unsharded(kind: str, rank: int, step: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the dequantised model through PEFT's own forward, in one process."""
    model = adapted(fp8_and_its_twin(kind, torch.float32)[1], ATTENTION[kind])
    loss, gradients = loss_and_gradients(model, batch(rank, step))
    return loss.item(), gradients


def mean(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}


@pytest.mark.parametrize("case", ["mistral4", "mistral4 twin", "mixtral", "mixtral twin", "accumulated"])
def test_losses_and_every_adapter_gradient_equal_those_of_one_unsharded_process(ranks: Ranks, case: str) -> None:
    kind, steps = CASES[case]["kind"], range(CASES[case].get("accumulate", 1))
    expected = [[unsharded(kind, rank, step) for step in steps] for rank in range(len(ranks))]
    for rank, alone in zip(ranks, expected, strict=True):
        assert rank[case]["losses"] == pytest.approx([loss for loss, _ in alone] * 2, rel=1e-5)
    gradients = mean([gradients for alone in expected for _, gradients in alone])
    assert any("experts" in name for name in gradients) and any("self_attn" in name for name in gradients)
    for rank in ranks:
        assert rank[case]["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert distance(rank[case]["gradients"][name], gradient) < 2e-5, name


def test_in_bf16_codes_give_what_the_dequantised_weights_give(ranks: Ranks) -> None:
    for rank in ranks:
        held, twin = rank["mistral4 bf16"], rank["mistral4 bf16 twin"]
        assert held["losses"] == pytest.approx(twin["losses"], rel=1e-3)
        for name, gradient in twin["gradients"].items():
            assert gradient.dtype == torch.float32 and gradient.abs().max() > 0
            assert distance(held["gradients"][name], gradient) < 1e-2, name


@pytest.mark.parametrize("case", ["mistral4", "mixtral", "mistral4 bf16"])
def test_layers_see_the_stored_codes_and_scales_bit_for_bit(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        seen = rank[case]["seen"]
        assert len(seen) == 2 * 2 * (10 if "mistral4" in case else 6)
        for name, (dtype, stored) in seen.items():
            assert dtype == ("torch.float32" if name.endswith("_scale_inv") else "torch.float8_e4m3fn"), name
            assert stored, name


def test_torch_would_cast_the_codes_and_the_layer_refuses_such_weights(ranks: Ranks) -> None:
    # When this fails because nothing was refused, torch has learnt to leave float8 alone: the exemption can go.
    # One process gathers nothing that is frozen, so that nothing is cast.
    expected = "was cast to torch.bfloat16" if len(ranks) > 1 else ""
    assert all(expected in rank["refused"] and bool(rank["refused"]) == (len(ranks) > 1) for rank in ranks)


def test_nothing_frozen_changes(ranks: Ranks) -> None:
    assert all(rank[case]["changed"] == [] for rank in ranks for case in CASES)


def test_codes_are_sharded_at_one_byte(ranks: Ranks) -> None:
    held = sum(rank["mistral4"]["local"] for rank in ranks)
    twin = sum(rank["mistral4 twin"]["local"] for rank in ranks)
    base, _ = fp8_and_its_twin("mistral4", torch.float32)
    codes = sum(p.numel() for p in base.parameters() if p.dtype == torch.float8_e4m3fn)
    scales = sum(4 * p.numel() for n, p in base.named_parameters() if n.endswith("_scale_inv"))
    assert held == twin - 3 * codes + scales
