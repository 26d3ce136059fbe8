"""One rank of a toy of every family: its part of the documents, and the gradients of all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from support.twins import TYPES, adapted, batch_of, documents, loss_and_gradients, toy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardtune.config.schema import ParallelSection
from shardtune.model.families.registry import family_for
from shardtune.parallel.mesh import Mesh
from shardtune.parallel.shard import shard_model


def main(folder: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    mesh = Mesh(1, world, (0,) * world, everyone, everyone)
    results = {}
    for kind in TYPES:
        model = adapted(toy(kind))
        family = family_for(kind)
        assert family is not None
        shard_model(model, ParallelSection(), mesh, None, family.decoder_layer[kind])
        assert all(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
        numbers = loss_and_gradients(model, *(batch_of("padded", [[one]]) for one in documents()[rank::world]))
        dist.all_reduce(numbers["loss"])
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in numbers.items()}
        # Gradients are averaged over ranks, the loss was added up.
        results[kind] = {n: v if n == "loss" else v * world for n, v in whole.items()}
    if rank == 0:
        torch.save(results, Path(folder) / f"{world}.pt")
    dist.destroy_process_group()
