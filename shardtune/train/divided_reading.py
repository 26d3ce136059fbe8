"""How do replicas divide the reading? Each reads a part of the rows they all hold, and sends it to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardtune.model.weight_loading import LocalShard, load_shards, read_jobs
from shardtune.parallel.mesh import own_group

if TYPE_CHECKING:
    from shardtune.model.shard_reader import ShardReader
    from shardtune.parallel.mesh import Mesh
    from shardtune.parallel.processes import Processes

_PART = 64 << 20  # bytes that are read by one rank and sent at once
_SAMPLE = 128 << 20  # bytes that are timed: a chunk for each reading thread
_SOON = 1.0  # seconds: what is read this fast is not worth a decision


@dataclass(frozen=True)
class Part:
    """Some rows of one parameter, and their bytes in the files."""

    shard: LocalShard
    nbytes: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.shard.into, self.shard.scale_into) if tensor is not None]


@dataclass(frozen=True)
class Readers:
    """The ranks that divide the reading of the same rows, this one among them, and what was measured to choose them.

    Attributes:
        group: None where this rank reads everything itself.
        temporary: The group serves nothing else.
        sampled: Indices of the parts that were read to measure the disk.
        disk_rate, link_rate: Bytes per second of the slowest node's disk and of the slowest broadcast between nodes.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    temporary: bool = False
    sampled: frozenset[int] = frozenset()
    disk_rate: float | None = None
    link_rate: float | None = None


def split(own: list[LocalShard], reader: ShardReader) -> list[Part]:
    """The shards in parts of about the same size; the same list on every rank that holds the same rows."""
    return [part for shard in own for part in _parts(shard, reader)]


def _parts(shard: LocalShard, reader: ShardReader) -> Iterator[Part]:
    if shard.scales_of is not None:
        yield Part(shard, shard.into.nbytes)
        return
    (first, end), nbytes = shard.rows, _stored_bytes(shard, reader)
    if nbytes <= _PART:
        yield Part(shard, nbytes)
        return
    step = max(1, (end - first) * _PART // nbytes)
    for start in range(0, end - first, step):
        rows = slice(start, min(start + step, end - first))
        scale = shard.scale_into[rows] if shard.scale_into is not None else None
        some = LocalShard(shard.name, (first + rows.start, first + rows.stop), shard.into[rows], scale_into=scale)
        yield Part(some, _stored_bytes(some, reader))


def _stored_bytes(shard: LocalShard, reader: ShardReader) -> int:
    return sum(job.nbytes for job in read_jobs([shard], reader))


def assign(parts: Sequence[Part], readers: int) -> list[int]:
    """Which of the readers has each part: stretches of about the same bytes, so that every disk reads in order."""
    total = max(1, sum(part.nbytes for part in parts))
    owners, seen = [], 0
    for part in parts:
        owners.append(min(readers - 1, (2 * seen + part.nbytes) * readers // (2 * total)))
        seen += part.nbytes
    return owners


def choose_readers(
    parts: Sequence[Part], reader: ShardReader, mesh: Mesh, processes: Processes, *, measure: bool
) -> Readers:
    """Who divides the reading; all ranks come to the same. A collective.

    Args:
        measure: Ranks of one node divide it in any case, since they share a disk; nodes only where that is faster,
            by the measured rates of the disks and of the network. False: all replicas divide it.
    """
    group = mesh.replica_group
    if group is None:
        return Readers((processes.rank,), None)
    everyone = tuple(dist.get_process_group_ranks(group))
    if not measure or len(set(mesh.nodes)) == 1:
        return Readers(everyone, group)

    owners = assign(parts, len(everyone))
    sampled = _sample(parts, owners, everyone.index(processes.rank))
    here = sum(mesh.nodes[rank] == mesh.nodes[processes.rank] for rank in everyone)
    dist.barrier(group=processes.control)  # disks that nodes share are measured under the load of all of them
    own_rate = _time_reading([parts[index] for index in sampled], reader)
    measured = processes.all_gather([own_rate, here, sum(part.nbytes for part in parts)])
    disk = min(rate * ranks for rate, ranks, _ in measured)
    fewest, whole = min(ranks for _, ranks, _ in measured), max(nbytes for *_, nbytes in measured)
    link = None
    if whole / disk >= _SOON:
        first = [parts[index] for index in _sample(parts, owners, 0)]
        link = min(processes.all_gather(_time_broadcast(first, everyone[0], group, processes)))
        if pays_between_nodes(whole, disk, link, nodes=len(everyone) / fewest):
            return Readers(everyone, group, False, frozenset(sampled), disk, link)
    return replace(_readers_on_this_node(mesh, processes), sampled=frozenset(sampled), disk_rate=disk, link_rate=link)


def pays_between_nodes(nbytes: float, disk: float, link: float, nodes: float) -> bool:
    """Whether nodes that read a part each and send it to each other are done before one that reads everything itself.

    Args:
        disk, link: Bytes per second.
    """
    return nbytes / (nodes * disk) + nbytes / link < nbytes / disk


def _readers_on_this_node(mesh: Mesh, processes: Processes) -> Readers:
    """The ranks of this node that hold the same rows as this one."""
    groups = [
        ranks
        for column in mesh.base.mesh.T.tolist()
        for node in sorted(set(mesh.nodes))
        if (ranks := [rank for rank in column if mesh.nodes[rank] == node])
    ]
    if max(map(len, groups)) == 1:
        return Readers((processes.rank,), None)
    group = own_group(groups, processes)
    return Readers(tuple(dist.get_process_group_ranks(group)), group, temporary=True)


def _sample(parts: Sequence[Part], owners: Sequence[int], reader: int) -> list[int]:
    """The first parts of one reader, enough of them to be timed."""
    found, nbytes = [], 0
    for index, (part, owner) in enumerate(zip(parts, owners, strict=True)):
        if owner == reader and nbytes < _SAMPLE:
            found.append(index)
            nbytes += part.nbytes
    return found


def _time_reading(parts: Sequence[Part], reader: ShardReader) -> float:
    """Bytes per second; infinite for nothing."""
    before, began = reader.progress.bytes, time.perf_counter()
    load_shards([part.shard for part in parts], reader)
    return _rate(reader.progress.bytes - before, time.perf_counter() - began)


def _time_broadcast(parts: Sequence[Part], source: int, group: dist.ProcessGroup, processes: Processes) -> float:
    """Bytes per second of what `source` has read; infinite for nothing. The first, small one opens the connections."""
    _broadcast([part.shard.into.view(-1)[:1] for part in parts[:1]], source, group)
    dist.barrier(group=processes.control)
    began = time.perf_counter()
    _broadcast([tensor for part in parts for tensor in part.tensors], source, group)
    return _rate(sum(tensor.nbytes for part in parts for tensor in part.tensors), time.perf_counter() - began)


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / max(seconds, 1e-9) if nbytes else float("inf")


def read_divided(
    parts: Sequence[Part],
    reader: ShardReader,
    readers: Readers,
    processes: Processes,
    on_progress: Callable[[int], None],
) -> int:
    """Read this rank's part into place, send it to the other readers and receive theirs; returns the bytes received.

    Args:
        on_progress: Called with the bytes (as stored) that others have read so far, again and again while waiting.
    """
    owners, me = assign(parts, len(readers.ranks)), readers.ranks.index(processes.rank)
    mine = [index for index, owner in enumerate(owners) if owner == me and index not in readers.sampled]
    load_shards([parts[index].shard for index in mine], reader)
    if readers.group is None:
        return 0
    # A reader that is slow is waited for here, where waiting is no lack of progress; one that hangs ends by itself.
    processes.wait_for_all("weights read", lambda: on_progress(0))
    received = stored = 0
    for part, owner in zip(parts, owners, strict=True):
        _broadcast(part.tensors, readers.ranks[owner], readers.group)
        if owner != me:
            received += sum(tensor.nbytes for tensor in part.tensors)
            stored += part.nbytes
        on_progress(stored)
    if readers.temporary:
        dist.destroy_process_group(readers.group)
    return received


def _broadcast(tensors: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """As bytes: not every backend knows float8. Done when this returns, on a GPU too."""
    for tensor in tensors:
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source, group=group)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
