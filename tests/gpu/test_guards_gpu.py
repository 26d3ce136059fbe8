"""What guards do in an ordinary step on a GPU: nothing that makes the host wait, and no bad gradient gets through."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from shardtune.config.schema import ParallelSection
from shardtune.parallel.processes import Processes, join
from shardtune.train.guards.numbers import drop_if_not_finite, exchange

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with join(ParallelSection(device="cuda")) as joined:
        yield joined
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("norm", [3.0, math.inf, math.nan])
def test_a_norm_is_looked_at_later_and_kept_from_the_optimizer_now(processes: Processes, norm: float) -> None:
    parameters = [torch.zeros(100, device="cuda", requires_grad=True) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full((100,), norm / 10, device="cuda")
    on_device = torch.tensor(norm, device="cuda")
    torch.cuda.set_sync_debug_mode("error")  # any wait for the device raises from here on
    seen = exchange(7, [1.5, 2.5], on_device, processes)
    drop_if_not_finite(parameters, on_device)
    torch.cuda.set_sync_debug_mode("default")
    assert seen.norm is not None and (seen.norm.value() == norm or (math.isnan(norm) and math.isnan(seen.norm.value())))
    assert (seen.loss, seen.bad) == (4.0, (-1,))
    expected = torch.full((100,), norm / 10 if math.isfinite(norm) else 0.0)
    assert all(
        torch.equal(parameter.grad.cpu(), expected) for parameter in parameters[:2] if parameter.grad is not None
    )
    assert parameters[2].grad is None
