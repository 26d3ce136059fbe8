"""The fast path against its eager twin on a CPU: everything `tests/gpu/test_fast_path.py` asks of a GPU, where it can run.

Variable-length attention is stood in for by what it means (`varlen_by_mask`); all the rest is the code a GPU runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import fast_path
import pytest
import torch

from shardtune.observe.compile_counter import graphs_compiled
from shardtune.parallel.mesh import Mesh

HIDDEN, LENGTH = 128, 64
SIZES = {"hidden": HIDDEN, "length": LENGTH}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with fast_path.one_rank("cpu") as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fast_path.varlen_by_mask)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", fast_path.KINDS)
def test_loss_and_every_adapters_gradient_are_the_twins(
    kind: str, dtype: torch.dtype, allowed: float, mesh: Mesh
) -> None:
    fast, eager = (fast_path.build(kind, mesh, dtype, fast=which, **SIZES) for which in (True, False))
    found = fast_path.differences(fast, eager, fast_path.packed_rows(LENGTH, seed=0))
    assert {name: error for name, error in found.items() if not error <= allowed} == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", fast_path.KINDS)
def test_nothing_is_compiled_again_whatever_documents_a_batch_has(
    kind: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is traced, guarded and traced again is the same for every backend; this one takes seconds.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast = fast_path.build(kind, mesh, torch.bfloat16, fast=True, compiled=True, **SIZES)
    eager = fast_path.build(kind, mesh, torch.bfloat16, fast=False, **SIZES)
    for seed in (0, 1):
        fast.loss_and_gradients(fast_path.packed_rows(LENGTH, seed))
    warm = graphs_compiled()
    batches = [fast_path.packed_rows(LENGTH, seed) for seed in range(2, 12)]
    for rows in batches:
        fast.loss_and_gradients(rows)
    assert len({sum(map(len, rows)) for rows in batches}) > 4  # documents
    assert warm > 0 and graphs_compiled() == warm
    assert dict(torch._dynamo.utils.counters["graph_break"]) == {}
    assert max(fast_path.differences(fast, eager, batches[0]).values()) <= 2e-2


@pytest.mark.parametrize("kind", fast_path.KINDS)
def test_the_host_waits_for_nothing_in_a_forward_and_backward_pass(kind: str, mesh: Mesh) -> None:
    fast = fast_path.build(kind, mesh, torch.bfloat16, fast=True, **SIZES)
    batch = fast.batch(fast_path.packed_rows(LENGTH, seed=0))
    with fast_path.HostReads() as reads:
        fast.loss(batch).backward()
    assert reads.found == []
    with reads:
        fast.loss(batch).item()
    assert reads.found == ["_local_scalar_dense"]
