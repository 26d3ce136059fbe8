"""The fast path of a run against its eager twin, on a GPU: values, recompilations, and nothing that waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import fast_path
import pytest
import torch

from shardtune.observe.compile_counter import graphs_compiled
from shardtune.parallel.mesh import Mesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HIDDEN, LENGTH = 1024, 512
SIZES = {"hidden": HIDDEN, "length": LENGTH}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    torch.cuda.set_device(0)
    with fast_path.one_rank("cuda") as mesh:
        yield mesh


@pytest.fixture(scope="module", params=list(fast_path.KINDS))
def paths(request: pytest.FixtureRequest, mesh: Mesh) -> tuple[fast_path.Path, fast_path.Path]:
    """Fast and compiled, already warm; and eager."""
    torch._dynamo.reset()
    fast = fast_path.build(request.param, mesh, torch.bfloat16, fast=True, compiled=True, **SIZES)
    for seed in range(3):
        fast.loss_and_gradients(fast_path.packed_rows(LENGTH, 100 + seed))
    return fast, fast_path.build(request.param, mesh, torch.bfloat16, fast=False, **SIZES)


def test_loss_and_every_adapters_gradient_are_the_twins(paths: tuple[fast_path.Path, fast_path.Path]) -> None:
    fast, eager = paths
    found = fast_path.differences(fast, eager, fast_path.packed_rows(LENGTH, seed=0))
    assert {name: error for name, error in found.items() if not error <= 2e-2} == {}


def test_nothing_is_compiled_again_whatever_documents_a_batch_has(
    paths: tuple[fast_path.Path, fast_path.Path],
) -> None:
    fast, _ = paths
    warm = graphs_compiled()
    batches = [fast_path.packed_rows(LENGTH, seed) for seed in range(10)]
    for rows in batches:
        fast.loss_and_gradients(rows)
    assert len({sum(map(len, rows)) for rows in batches}) > 4  # documents
    assert warm > 0 and graphs_compiled() == warm


def test_the_host_waits_for_nothing_in_a_step(paths: tuple[fast_path.Path, fast_path.Path]) -> None:
    fast, _ = paths
    trained = [p for p in fast.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-9, fused=True)
    batches = [fast.batch(fast_path.packed_rows(LENGTH, seed)) for seed in range(2)]
    for number, batch in enumerate(batches):
        torch.cuda.synchronize()
        # The first step makes the optimizer's state; the second one is an ordinary step.
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            loss = fast.loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)
