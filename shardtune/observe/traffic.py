"""How many bytes does this rank send, and where to? Collectives are counted as they are issued; nothing waits for them.

What is counted is what a ring sends: of a buffer of B bytes over n ranks, B(n-1)/n from each rank to the next one in an
all-gather or a reduce-scatter, twice that in an all-reduce.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.observe.schema import DIMENSIONS, Dimension


@dataclass(frozen=True)
class _Collective:
    """A function of torch.distributed.

    Args:
        buffer: Position and name of the argument that is as large as what the ring sends (a list: all of it).
        group: Position of the process group.
        rounds: How often the ring sends the buffer.
        dimension: The dimension of a mesh in which FSDP2 uses it, if any.
    """

    name: str
    buffer: tuple[int, str]
    group: int
    rounds: int = 1
    dimension: Dimension = "other"


_COLLECTIVES = (
    _Collective("all_gather_into_tensor", (0, "output_tensor"), 2, dimension="shard"),
    _Collective("all_gather_single", (0, "output_tensor"), 2, dimension="shard"),  # its name from torch 2.13 on
    _Collective("reduce_scatter_tensor", (1, "input"), 3, dimension="shard"),
    _Collective("reduce_scatter_single", (1, "input"), 3, dimension="shard"),
    _Collective("all_reduce", (0, "tensor"), 2, rounds=2, dimension="replicate"),
    _Collective("all_gather", (0, "tensor_list"), 2),
    _Collective("broadcast", (0, "tensor"), 2),  # all ranks but the last pass it on: on average as much
)


@dataclass(frozen=True)
class _Group:
    size: int
    leaves_node: bool  # the next rank of the ring is on another node


class TrafficCounter:
    """Adds up what this rank sends in collectives, by dimension of the mesh that `model` is sharded over.

    Weights and gradients are sent in the dimensions `shard` and `replicate`; everything else (token counts, the
    gradient norm, flags) is `other`. Only calls of `torch.distributed` are seen: not DDP's, nor DTensor's own.

    Args:
        model: Sharded with `fully_shard`.
        nodes: The node of every rank (`nodes_of_ranks`).
        is_counting: Whether what is sent now is part of a step.
    """

    def __init__(self, model: nn.Module, nodes: Sequence[object], is_counting: Callable[[], bool]) -> None:
        self._nodes, self._is_counting = nodes, is_counting
        self._dimensions = _dimensions(model)
        self._groups: dict[str, _Group] = {}
        self._sent: Counter[tuple[Dimension, str]] = Counter()  # by group, times its size: divided once, in `take`
        self._undo = [self._wrap(collective) for collective in _COLLECTIVES if hasattr(dist, collective.name)]

    def take(self) -> dict[str, dict[Dimension, int]]:
        """Bytes since the last call by dimension, all and those that left the node, as in a `profile` event."""
        sent, between_nodes = dict.fromkeys(DIMENSIONS, 0), dict.fromkeys(DIMENSIONS, 0)
        for (dimension, name), times_size in self._sent.items():
            group = self._groups[name]
            sent[dimension] += times_size // group.size
            between_nodes[dimension] += times_size // group.size if group.leaves_node else 0
        self.drop()
        return {"collectives": sent, "collectives_between_nodes": between_nodes}

    def drop(self) -> None:
        self._sent.clear()

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _wrap(self, collective: _Collective) -> Callable[[], None]:
        original = getattr(dist, collective.name)
        (position, name), group_position = collective.buffer, collective.group

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._is_counting():
                buffer = args[position] if len(args) > position else kwargs[name]
                group = args[group_position] if len(args) > group_position else kwargs.get("group")
                self._count(collective, buffer, group)
            return original(*args, **kwargs)

        def undo() -> None:
            if getattr(dist, collective.name) is counted:  # otherwise a profiler that was opened later still calls this
                setattr(dist, collective.name, original)

        setattr(dist, collective.name, counted)
        return undo

    def _count(
        self, collective: _Collective, buffer: torch.Tensor | list[torch.Tensor], group: dist.ProcessGroup | None
    ) -> None:
        # FSDP2 names its group in each call, even if it is that of all ranks; who means "all ranks" names none.
        name = group.group_name if group is not None else ""
        if name not in self._groups:
            self._groups[name] = self._look_up(group)
        is_in_mesh = collective.dimension in self._dimensions.get(name, ())
        dimension = collective.dimension if is_in_mesh else "other"
        size = sum(part.nbytes for part in buffer) if isinstance(buffer, list) else buffer.nbytes
        self._sent[dimension, name] += collective.rounds * size * (self._groups[name].size - 1)

    def _look_up(self, group: dist.ProcessGroup | None) -> _Group:
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        following = ranks[(ranks.index(own) + 1) % len(ranks)]
        return _Group(len(ranks), leaves_node=self._nodes[following] != self._nodes[own])


def nodes_of_ranks(device: torch.device) -> list[int]:
    """A number for the node of each rank, by global rank. A collective."""
    # The launcher's number and the host: launchers may share a host, and not every launcher numbers its nodes.
    name = f"{os.environ.get('GROUP_RANK', '')}@{socket.gethostname()}"
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()  # a positive int64
    mine = torch.tensor([int.from_bytes(digest, "big")], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [int(one) for one in everyone]


def _dimensions(model: nn.Module) -> dict[str, set[Dimension]]:
    """The dimensions of the meshes that parameters are sharded over, by the names of their process groups."""
    found: dict[str, set[Dimension]] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            for index, placement in enumerate(parameter.placements):
                name = parameter.device_mesh.get_group(index).group_name
                found.setdefault(name, set()).add("replicate" if placement.is_replicate() else "shard")
    return found
