"""How far is the frozen base sharded? The least that fits, by arithmetic; groups that nodes cannot have are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardtune.errors import UserInputError
from shardtune.plan import sharding
from shardtune.terminal import count

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.plan.facts import Facts, LayerKind


def ranks_of_a_replica(config: RunConfig, facts: Facts) -> int:
    """Over how many ranks the base will be sharded: with `auto` over more than a node's only if float8 needs that too.

    Dequantising costs less than sending the base between nodes.
    """
    nodes, asked = facts.machine.nodes, config.parallel.shard
    if asked != "auto":
        inside = config.parallel.shard_size or sharding.within_a_node(nodes)
        return {"full": sum(nodes), "hybrid": inside, "replicate": 1}[asked]
    inside = sharding.within_a_node(nodes)
    return inside if memory_needed(config, facts, inside, fp8=True) <= _usable(facts) else sum(nodes)


def choices(resolved: ResolvedConfig, facts: Facts) -> Iterator[tuple[str, object, str]]:
    """The least sharding that fits, and whether gathered weights are kept from one pass to the next."""
    config, nodes = resolved.config, facts.machine.nodes
    ranks = sum(nodes)
    asked: str = config.parallel.shard
    shards = {"full": ranks, "replicate": 1}.get(asked)
    if asked == "hybrid":
        shards = _group_size(config.parallel.shard_size, nodes)
        if config.parallel.shard_size is None:
            yield "parallel.shard_size", shards, "the processes of a node"
    elif asked == "auto":
        asked, shards, why = _least_sharding(config, facts)
        yield "parallel.shard", asked, why
        if asked == "hybrid":
            yield "parallel.shard_size", shards, "the fewest processes whose memory holds a replica"
        yield from _without_effect(config, asked)
    assert shards is not None
    if config.parallel.reshard_after_forward == "auto" and asked != "replicate":
        yield "parallel.reshard_after_forward", *_reshard(config, facts, shards)


def _without_effect(config: RunConfig, chosen: str) -> Iterator[tuple[str, object, str]]:
    """What would be refused beside the value that `auto` came to: the run's own config must be one that can be run."""
    if chosen == "replicate" and config.parallel.reshard_after_forward != "auto":
        yield "parallel.reshard_after_forward", "auto", "no effect: no frozen weight is gathered"
    if chosen == "full" and config.model.load == "read-once":
        yield "model.load", "auto", "read-once has no effect: there is one replica of the base"
    if chosen == "full" and config.guards.replica_check_steps:
        yield "guards.replica_check_steps", 0, "no effect: there is one replica of the base"


def _least_sharding(config: RunConfig, facts: Facts) -> tuple[str, int, str]:
    """The value of `parallel.shard`, how many ranks share a replica, and why not fewer."""
    nodes, usable = facts.machine.nodes, _usable(facts)
    ranks = sum(nodes)
    if config.parallel.offload_params and facts.machine.device == "cuda":
        return "full", ranks, "parallel.offload_params keeps weights in host memory, which a node's processes share"
    if ranks == 1:
        return "replicate", 1, "one process"
    sizes = list(sharding.group_sizes(nodes))
    for shards in sizes:
        needed = memory_needed(config, facts, shards)
        if needed <= usable:
            why = f"it fits: {sharding.needs_text(needed, usable)}"
            if shards > 1:
                fewer = sizes[sizes.index(shards) - 1]
                over = sharding.needs_text(memory_needed(config, facts, fewer), usable)
                why += f"; {count(fewer, 'process', 'es')} per replica would need {over}"
            return "replicate" if shards == 1 else "full" if shards == ranks else "hybrid", shards, why
    least = sharding.needs_text(memory_needed(config, facts, ranks), usable)
    return "full", ranks, f"the least memory: {least}, which may not fit"


def full_reshards(config: RunConfig, facts: Facts) -> bool:
    """Whether full sharding would free gathered weights after each forward pass."""
    asked = config.parallel.reshard_after_forward
    return _reshard(config, facts, facts.machine.world_size)[0] if asked == "auto" else asked


def _reshard(config: RunConfig, facts: Facts, shards: int) -> tuple[bool, str]:
    offloaded = config.parallel.offload_params and facts.machine.device == "cuda"
    if offloaded:
        return True, "parallel.offload_params is true"
    needed, usable = memory_needed(config, facts, shards, resharded=False), _usable(facts)
    if needed <= usable:
        return False, f"the gathered base fits: {sharding.needs_text(needed, usable)}"
    return True, f"the gathered base would need {sharding.needs_text(needed, usable)}"


def hybrid_notice(config: RunConfig, facts: Facts) -> str | None:
    """What `hybrid` comes to where it is no mixture of replicas and shards."""
    nodes, asked = facts.machine.nodes, config.parallel.shard_size
    shards, ranks = asked or sharding.within_a_node(nodes), sum(nodes)
    if config.parallel.shard != "hybrid" or 1 < shards < ranks:
        return None
    if ranks == 1:
        why, what = "there is one process", "nothing is sharded"
    elif shards == 1:
        why = "parallel.shard_size is 1" if asked else "each node has one process"
        what = "every process holds the whole base, as with replicate"
    else:
        why = f"parallel.shard_size is {shards}" if asked else "there is one node"
        what = f"the base is sharded over all {ranks} processes, as with full"
    return f"parallel.shard is hybrid, but {why}: {what}."


def _group_size(asked: int | None, nodes: tuple[int, ...]) -> int:
    """Of `hybrid`; refused where nodes cannot have it."""
    if asked is None and len(set(nodes)) == 1:
        return nodes[0]
    possible = list(sharding.group_sizes(nodes))
    if asked is not None and asked in possible:
        return asked
    groups = [size for size in possible if 1 < size < sum(nodes)]
    layout, instead = " + ".join(map(str, nodes)), "parallel.shard: full or replicate"
    processes = count(sum(nodes), "process", "es")
    raise UserInputError(
        f"parallel.shard is hybrid, but nodes have different numbers of processes ({layout})."
        if asked is None
        else f"parallel.shard_size is {asked}, but the run has {processes} ({layout} per node).",
        why="Groups must be of equal size, and lie within nodes or consist of whole nodes.",
        fix=f"Set parallel.shard_size to {_either(groups)}, or {instead}." if groups else f"Set {instead}.",
    )


def _either(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def memory_needed(
    config: RunConfig, facts: Facts, shards: int, *, fp8: bool | None = None, resharded: bool | None = None
) -> int:
    """Bytes a rank needs with `shards` ranks per replica. What is left open counts as what needs more memory."""
    in_float8 = config.model.base_precision == "fp8" if fp8 is None else fp8
    if resharded is None:
        resharded = config.parallel.reshard_after_forward is not False
    layers = sum(kind.count * kind.size for kind in facts.kinds)
    widths = [(kind, _width(kind, facts)) for kind in facts.kinds]
    root = facts.parameters - layers
    codes = (facts.quantised or layers) if in_float8 else 0
    base = codes + (facts.parameters - codes) * facts.value_bytes
    per_value = base / facts.parameters
    model = sharding.ModelSize(
        base=base,
        root=root * facts.value_bytes,
        largest_layer=int(max((kind.size for kind in facts.kinds), default=0) * per_value),
        trained=facts.trained,
        layers=facts.layers,
        hidden=facts.hidden,
        vocabulary=facts.vocabulary,
        width=sum(kind.count * width for kind, width in widths),
        largest_width=max((width for _, width in widths), default=0),
    )
    train = config.train
    work = sharding.Work(
        tokens=train.per_device_train_batch_size * config.data.max_length,
        value_bytes=2 if train.bf16 is True or facts.dtype == "bfloat16" else 4,
        recomputed=train.gradient_checkpointing is True,
        compiled=train.compile is True,
        fused_loss=train.fused_loss is not False and facts.loss_obstacle is None,
    )
    prefetched = max(config.parallel.forward_prefetch, config.parallel.backward_prefetch)
    return sharding.memory_needed(
        model, work, shards, facts.machine.world_size, prefetched=prefetched, resharded=resharded
    )


def _width(kind: LayerKind, facts: Facts) -> int:
    """A token passes through the matrices of a layer, and of the fused experts through those it is routed to."""
    shapes = [shape for shape in kind.parameters.values() if len(shape) > 1]
    return sum(sum(shape[-2:]) * (facts.experts_per_token if len(shape) == 3 else 1) for shape in shapes)


def _usable(facts: Facts) -> int:
    return sharding.usable(facts.machine.memory, facts.machine.device)
