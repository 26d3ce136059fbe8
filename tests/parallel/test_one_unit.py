"""One process that gathers adapters alone does so at once; where that is a lot, layer by layer, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import fast_path
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardtune.config.schema import ParallelSection
from shardtune.parallel import shard
from shardtune.parallel.mesh import Mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with fast_path.one_rank("cpu") as mesh:
        yield mesh


def units(path: fast_path.Path) -> list[str]:
    found = [module for module in path.model.modules() if isinstance(module, FSDPModule)]
    return [type(module).__name__.removeprefix("FSDP") for module in found]


@pytest.mark.parametrize("kind", list(fast_path.KINDS))
def test_layers_are_units_of_their_own_only_where_much_is_gathered(
    kind: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = fast_path.packed_rows(64, seed=0)
    sizes = {"hidden": 128, "length": 64}
    whole = fast_path.build(kind, mesh, torch.bfloat16, fast=False, **sizes)
    monkeypatch.setattr(shard, "_ONE_UNIT", 1000)
    layered = fast_path.build(kind, mesh, torch.bfloat16, fast=False, **sizes)
    layer = {"dense": "MistralDecoderLayer", "mixture": "Mistral4DecoderLayer"}[kind]
    assert units(whole) == ["PeftModelForCausalLM"]
    assert units(layered) == ["PeftModelForCausalLM", layer, layer]
    meant = layered.loss_and_gradients(rows)
    for name, value in whole.loss_and_gradients(rows).items():
        assert torch.equal(value, meant[name]), name
    assert shard.layers_of(whole.model) and len(shard.layers_of(layered.model)) == 2


def test_adapters_are_shards_again_once_let_go_and_after_backward(mesh: Mesh) -> None:
    path = fast_path.build("dense", mesh, torch.bfloat16, fast=False, hidden=128, length=64)
    batch = path.batch(fast_path.packed_rows(64, seed=0))

    def are_shards() -> bool:
        return all(isinstance(p, DTensor) for p in path.model.parameters() if p.requires_grad)

    with torch.no_grad():
        path.loss(batch)
    shard.reshard_all(path.model)
    assert are_shards()
    loss = path.loss(batch)
    assert not are_shards()  # gathered, for backward
    loss.backward()
    assert are_shards()


def test_frozen_weights_that_are_cast_when_they_are_gathered_keep_their_layers(mesh: Mesh) -> None:
    path = fast_path.build("dense", mesh, torch.float32, fast=True, hidden=128, length=64)
    told = [p for p in path.model.parameters() if not p.requires_grad]
    stay = shard._unsharded_params(path.model, mesh, torch.bfloat16, ParallelSection())
    assert stay is not None and not any(p in stay for p in told)  # float32, to be gathered as bf16
    assert not shard._fits_one_unit(path.model, None)  # several processes: nothing stays put
