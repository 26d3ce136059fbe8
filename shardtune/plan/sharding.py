"""How far must the frozen base be sharded to fit in memory? Arithmetic on bytes, for `parallel.shard: auto`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from shardtune.terminal import size

_CONTEXT = 1 << 30  # CUDA context and communication buffers; on a host Python and its libraries
_USABLE = {"cuda": 0.94, "cpu": 0.8}  # of what is left: fragmentation, and what the estimate below does not see
# Of the values that go into and come out of a layer's products, what all its operations keep for the backward pass:
# 23.3 widths of the residual stream for a Llama of 18.6, and 18.1 compiled (docs/activations.md).
_KEPT, _KEPT_COMPILED = 1.25, 1.0
_LOSS_CHUNK = 512 << 20  # of the fused loss
_STATE = 16  # bytes per trained parameter: value, gradient and two moments in float32
_GATHERED = 8  # the same, gathered, with its gradient before it is reduced


@dataclass(frozen=True)
class ModelSize:
    """What the arithmetic needs to know about the model.

    Attributes:
        base: Bytes of the frozen weights as they are held.
        root: Those of them outside of the decoder layers.
        largest_layer: Those of the largest decoder layer.
        trained: Parameters that train.
        width: Values per token that go into and come out of the products of all layers.
        largest_width: Of one layer.
    """

    base: int
    root: int
    largest_layer: int
    trained: int
    layers: int
    hidden: int
    vocabulary: int
    width: int
    largest_width: int


@dataclass(frozen=True)
class Work:
    """What a micro-batch asks of memory. `recomputed`: layers keep their inputs only."""

    tokens: int
    value_bytes: int
    recomputed: bool
    compiled: bool
    fused_loss: bool


def memory_needed(model: ModelSize, work: Work, shards: int, ranks: int, *, prefetched: int, resharded: bool) -> int:
    """Bytes a rank needs at the peak of a step, estimated.

    Args:
        shards: Ranks over which one replica of the base is sharded, of `ranks` in all.
        prefetched: Layers gathered ahead.
        resharded: A layer's gathered weights are freed after its forward pass.
    """
    gathered = 0
    if shards > 1:
        gathered = model.root + (2 + prefetched) * model.largest_layer if resharded else model.base
    state = _STATE * model.trained // (ranks if shards == 1 else shards) + _GATHERED * model.trained
    share = _KEPT_COMPILED if work.compiled else _KEPT
    kept = model.layers * model.hidden + share * model.largest_width if work.recomputed else share * model.width
    logits = work.tokens * model.vocabulary * (2 * 4 + work.value_bytes)
    loss = min(logits, _LOSS_CHUNK) if work.fused_loss else logits
    return model.base // shards + gathered + state + int(work.tokens * kept) * work.value_bytes + loss


def usable(memory: int, device: str) -> int:
    """Of a rank's memory, what a run may fill."""
    return int((memory - _CONTEXT) * _USABLE[device])


def group_sizes(nodes: Sequence[int]) -> Iterator[int]:
    """How many ranks may share a replica, the fewest first: groups lie within nodes, or are made of whole nodes.

    Args:
        nodes: The number of ranks on each node.
    """
    ranks = sum(nodes)
    return (count for count in range(1, ranks + 1) if ranks % count == 0 and fits_nodes(count, nodes))


def fits_nodes(count: int, nodes: Sequence[int]) -> bool:
    """Whether groups of `count` ranks never hold a part of one node and something of another."""
    of_nodes = {sum(nodes[:node]) for node in range(len(nodes) + 1)}
    of_groups = set(range(0, sum(nodes) + 1, count))
    return of_nodes <= of_groups or of_groups <= of_nodes


def within_a_node(nodes: Sequence[int]) -> int:
    """The largest group that lies within a node everywhere."""
    return gcd(*nodes)


def needs_text(needed: int, available: int) -> str:
    return f"about {size(needed)} per rank of {size(available)} usable"
