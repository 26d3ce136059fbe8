"""How much of a node does a run need beside its GPUs? Host memory, `/dev/shm` and disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardtune.plan.memory import fp8_weights, gpu_memory

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.plan.facts import Facts
    from shardtune.plan.work import Work

# Resident memory of a rank with a GPU: Python, its libraries, and the buffers that weights are read through. Measured
# with 12 GB of weights; it does not grow with the model (docs/loading.md).
_PROCESS = 1_300_000_000
_COMPILER = 2 << 30  # where layers are compiled: inductor and its workers, Triton. An estimate.
_BATCH_TOKEN = 48  # bytes: ids, labels, positions, mask, supervised positions and targets
_NCCL_SHARED = 64 << 20  # of a rank that has others on its node, in /dev/shm. An estimate.
_GRADIENT = _MASTER = 4
_RNG = 15_500  # bytes of random state in a checkpoint, of each rank
_HEADER = 150  # of a tensor in a safetensors file: its name, shape and place
_TEXT = 40_000  # trainer.json, adapter_config.json, manifest


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a node.

    Attributes:
        per_rank: Host memory of one rank: its process, and all that it has offloaded.
        offloaded: Of it, what offloading puts there.
        pinned: Of it, page-locked memory. torch rounds each tensor up to a power of two.
        per_node: Of the node with the most ranks, with the state of a checkpoint that is being written.
        shm: Of `/dev/shm`: batches on their way from dataloader workers, NCCL.
        checkpoint: On disk, one checkpoint: adapter, optimizer, random state.
        disk: All checkpoints that are kept, one more while it is written, and the final adapter.
    """

    per_rank: int
    offloaded: int
    pinned: int
    per_node: int
    shm: int
    checkpoint: int
    disk: int


def host_memory(facts: Facts, work: Work, config: RunConfig) -> HostMemory:
    """What a run needs of the node that has the most ranks."""
    machine, ranks = facts.machine, max(facts.machine.nodes)
    tensors = list(_offloaded(facts, work)) if machine.device == "cuda" else []
    state = _optimizer_share(facts, work) if work.offload_params and machine.device == "cuda" else 0
    pinned = sum(map(_power_of_two, tensors))
    if machine.device == "cpu":
        process = gpu_memory(facts, work).total
    else:
        process = _PROCESS + (_COMPILER if work.compiled else 0)
    per_rank = process + pinned + state
    checkpoint = checkpoint_bytes(facts, work)
    kept = (config.train.save_total_limit or 1) + 1 if config.train.save_strategy != "no" else 0
    return HostMemory(
        per_rank=per_rank,
        offloaded=sum(tensors) + state,
        pinned=pinned,
        per_node=ranks * per_rank + checkpoint,
        shm=ranks * _shared(work, config) + (ranks * _NCCL_SHARED if ranks > 1 and machine.device == "cuda" else 0),
        checkpoint=checkpoint,
        disk=kept * checkpoint + _MASTER * facts.trained,
    )


def checkpoint_bytes(facts: Facts, work: Work) -> int:
    """Of one checkpoint on disk."""
    values = (_MASTER + work.optimizer_bytes) * facts.trained
    factors = 2 * sum(kind.count * len(kind.adapted) for kind in facts.kinds)
    entries = factors * (1 + (work.optimizer_bytes // 4 + 1 if work.optimizer_bytes else 0))  # with a count of steps
    return values + entries * _HEADER + _RNG * facts.machine.world_size + _TEXT


def _offloaded(facts: Facts, work: Work) -> Iterator[int]:
    """Bytes of each tensor that a rank keeps in page-locked memory."""
    if work.offload_activations and work.checkpointing == "full":
        yield from [work.tokens * facts.hidden * work.value_bytes] * facts.layers
    if not work.offload_params:
        return
    for kind in facts.kinds:
        codes = fp8_weights(kind) if work.fp8 else frozenset()
        for name, shape in kind.parameters.items():
            share = -(-shape[0] // work.shards) * prod(shape[1:])
            yield from [share * (1 if name in codes else facts.value_bytes)] * kind.count
    for shape in facts.root.values():
        yield -(-shape[0] // work.shards) * prod(shape[1:]) * facts.value_bytes
    yield facts.trained * (_MASTER + _GRADIENT) // work.shards


def _optimizer_share(facts: Facts, work: Work) -> int:
    return work.optimizer_bytes * facts.trained // work.shards


def _shared(work: Work, config: RunConfig) -> int:
    train = config.train
    ahead = train.dataloader_prefetch_factor or 2
    return train.dataloader_num_workers * ahead * work.tokens * _BATCH_TOKEN


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0
