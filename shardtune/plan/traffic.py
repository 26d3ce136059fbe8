"""How many bytes does an optimizer step send? From the sizes of what is gathered and reduced, for a ring.

Of a buffer of B bytes over n ranks, a ring sends B(n-1)/n from each rank to the next one in an all-gather or a
reduce-scatter, and twice that in an all-reduce. Left out: the padding of tensors whose rows cannot be divided evenly
among the ranks, and what is small (token counts, the gradient norm, flags).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardtune.terminal import size

Adapters = Literal["sharded", "replicated"]


@dataclass(frozen=True)
class ModelBytes:
    """What a collective sends of a model.

    Args:
        layers: Bytes of the layers' frozen weights as they are gathered: 2 per parameter in bf16; in FP8 1, and scales.
        root: Of embeddings, final norm and head, likewise: they stay gathered from forward to backward.
        trained: Trained parameters, all of them in the layers.
        gathered: Bytes per trained parameter in an all-gather: those of the compute dtype.
        reduced: Bytes per gradient in a reduction: those of `parallel.reduce_dtype`.
    """

    layers: int
    root: int
    trained: int
    gathered: int = 2
    reduced: int = 4


@dataclass(frozen=True)
class StepTraffic:
    """Bytes sent per optimizer step.

    Args:
        shard: By each rank, to those that hold the other shards.
        replicate: By each rank, to those that hold the same shard in other replicas.
        between_nodes: From a node to other nodes, all its ranks together; where nodes differ, the most.
    """

    shard: int
    replicate: int
    between_nodes: int


@dataclass(frozen=True)
class AdapterLayout:
    """Where every rank holds the whole base: the adapters' layout that sends less, and the bytes per rank of each."""

    adapters: Adapters
    sharded: int
    replicated: int


def step_traffic(
    model: ModelBytes,
    *,
    replicas: int,
    nodes: Sequence[int],
    micro_batches: int = 1,
    reshard_after_forward: bool = True,
    offload_params: bool = False,
    adapters: Adapters = "sharded",
) -> StepTraffic:
    """What a step sends on a mesh of (replicas × shards).

    Args:
        replicas: Copies of the base; each is sharded over the other dimension. 1: full sharding.
        nodes: The node of every rank, in the order of the mesh: the shards of a replica are next to each other.
        micro_batches: Per step (gradient accumulation).
        reshard_after_forward: Layers are gathered again in backward; otherwise everything is gathered once per step.
        offload_params: Gradients are reduced for each micro-batch, and nothing stays gathered for the next one.
        adapters: Where each rank holds the whole base (as many replicas as ranks): whether what trains is sharded over
            all ranks, gathered once per step, or replicated too.
    """
    world = len(nodes)
    shards, rest = divmod(world, replicas)
    if rest:
        raise ValueError(f"{world} ranks are not {replicas} replicas of the same size")
    reduced = model.trained * model.reduced * (micro_batches if offload_params else 1)
    if shards == 1 and adapters == "sharded":
        return _sent(model.trained * model.gathered + reduced, 0, shards=world, replicas=1, nodes=nodes)
    layers = (model.layers + model.trained * model.gathered) * (2 if reshard_after_forward else 1)
    # What is kept from forward to backward is kept until the step's last backward pass.
    times = micro_batches if reshard_after_forward or offload_params else 1
    return _sent((layers + model.root) * times + reduced, reduced, shards=shards, replicas=replicas, nodes=nodes)


def adapter_layout(model: ModelBytes, ranks: int) -> AdapterLayout:
    """The cheaper layout where every rank holds the whole base; of two that send the same, the one with less memory."""
    nodes = [0] * ranks
    sharded = step_traffic(model, replicas=ranks, nodes=nodes, adapters="sharded").shard
    replicated = step_traffic(model, replicas=ranks, nodes=nodes, adapters="replicated").replicate
    return AdapterLayout("sharded" if sharded <= replicated else "replicated", sharded, replicated)


def traffic_sentence(sent: StepTraffic, full: StepTraffic) -> str:
    """`a step sends 105 MiB from each node (full sharding would send 1.2 TiB)`; on one node, of each process."""
    if full.between_nodes:
        where, own, other = "from each node", sent.between_nodes, full.between_nodes
    else:
        where, own, other = "from each process", sent.shard + sent.replicate, full.shard
    compared = f" (full sharding would send {size(other)})" if sent != full else ""
    return f"a step sends {size(own)} {where}{compared}"


def _sent(scattered: int, all_reduced: int, *, shards: int, replicas: int, nodes: Sequence[int]) -> StepTraffic:
    """Of `scattered` bytes of all-gathers and reduce-scatters, and all-reduces of a rank's part of `all_reduced`."""
    shard = scattered * (shards - 1) // shards
    replicate = 2 * all_reduced * (replicas - 1) // (shards * replicas)
    leaving: dict[int, int] = dict.fromkeys(nodes, 0)
    for rank, node in enumerate(nodes):
        replica, position = divmod(rank, shards)
        if nodes[replica * shards + (position + 1) % shards] != node:
            leaving[node] += shard
        if nodes[(replica + 1) % replicas * shards + position] != node:
            leaving[node] += replicate
    return StepTraffic(shard, replicate, max(leaving.values()))
