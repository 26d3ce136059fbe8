"""Which groups of processes does `hybrid` make? Those that nodes cannot have are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardtune.errors import UserInputError
from shardtune.plan import sharding
from shardtune.terminal import count

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.plan.facts import Facts


def choices(resolved: ResolvedConfig, facts: Facts) -> Iterator[tuple[str, object, str]]:
    """The size of hybrid's groups, where it is not given."""
    parallel = resolved.config.parallel
    if parallel.shard == "hybrid":
        shards = _group_size(parallel.shard_size, facts.machine.nodes)
        if parallel.shard_size is None:
            yield "parallel.shard_size", shards, "the processes of a node"


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
