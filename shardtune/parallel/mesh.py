"""Which ranks hold which rows? The mesh of a run: replicas of the frozen base, each sharded over a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from shardtune.parallel.processes import Processes

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Mesh:
    """Ranks as (replicate × shard), sorted by node, so that shards are next to each other.

    Attributes:
        replicas: Copies of the frozen base.
        shards: Ranks over which one copy is sharded; replicas × shards is the number of ranks.
        nodes: The node of every rank.
        base: What frozen weights are sharded over: ("shard",) with one replica, else ("replicate", "shard").
        trained: What adapters are sharded over: as the base, or ("shard",) over all ranks although the base is not.
    """

    replicas: int
    shards: int
    nodes: tuple[int, ...]
    base: DeviceMesh
    trained: DeviceMesh

    @property
    def size(self) -> int:
        return self.replicas * self.shards

    @property
    def device_type(self) -> str:
        return self.base.device_type

    @property
    def splits_adapters_only(self) -> bool:
        return self.trained is not self.base

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same rows of the base as this one; None with one replica."""
        return self.base.get_group(REPLICATE) if self.replicas > 1 else None


def build_mesh(processes: Processes, shards: int | None = None, *, shard_adapters: bool = False) -> Mesh:
    """The mesh of a run. A collective: its process groups are opened here.

    Args:
        shards: Ranks per replica of the base, a divisor of their number; None = all.
        shard_adapters: Shard adapters over all ranks, whatever the base is sharded over.
    """
    world, kind = processes.world_size, processes.device.type
    shards = shards or world
    everyone = init_device_mesh(kind, (world,), mesh_dim_names=(SHARD,))
    if shards == world:
        return Mesh(1, world, processes.nodes, everyone, everyone)
    ranks = sorted(range(world), key=lambda rank: (processes.nodes[rank], rank))
    table = torch.tensor(ranks).view(-1, shards)
    # Not `init_device_mesh`: its groups have torch's own timeout, which may end a run before the watchdog says why.
    groups = [own_group(table.T.tolist(), processes), own_group(table.tolist(), processes)]
    base = DeviceMesh.from_group(groups, kind, mesh=table, mesh_dim_names=(REPLICATE, SHARD))
    return Mesh(world // shards, shards, processes.nodes, base, everyone if shard_adapters else base)


def own_group(groups: list[list[int]], processes: Processes) -> dist.ProcessGroup:
    """The one that this rank is in; every rank has to open all of them, in the same order."""
    opened = [dist.new_group(ranks, timeout=processes.timeout) for ranks in groups]
    own: dist.ProcessGroup = opened[next(n for n, ranks in enumerate(groups) if processes.rank in ranks)]
    return own
