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
        disk_rate, link_rate: Bytes per second of the slowest node's disk, and of the slowest broadcast among replicas.
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
        measure: Choose what is fastest by the measured rates of disks and broadcasts: every rank reads everything, the
            ranks of a node divide it, or those of all nodes. False: all replicas divide it.
    """
    group = mesh.replica_group
    if group is None:
        return Readers((processes.rank,), None)
    everyone = Readers(tuple(dist.get_process_group_ranks(group)), group)
    if not measure:
        return everyone
    owners = assign(parts, len(everyone.ranks))
    sampled = _sample(parts, owners, everyone.ranks.index(processes.rank))
    here = sum(mesh.nodes[rank] == mesh.nodes[processes.rank] for rank in everyone.ranks)
    dist.barrier(group=processes.control)  # a disk that ranks share is measured under the load of all of them
    own_disk = _time_reading([parts[index] for index in sampled], reader)
    read = reader.progress.bytes
    own_cache = _time_reading([parts[index] for index in sampled], reader)
    reader.progress.bytes = read  # the second time nothing new was read
    measured = processes.all_gather([own_disk * here, own_cache, here, sum(part.nbytes for part in parts)])
    disk, cache, fewest, _ = map(min, zip(*measured, strict=True))
    nbytes = max(rank[3] for rank in measured)

    best, seconds, link = Readers((processes.rank,), None), seconds_alone(nbytes, disk, cache), None
    options = _divisions(everyone, mesh, processes) if seconds >= _SOON else []
    for readers in options:
        sample = [parts[index] for index in _sample(parts, owners, everyone.ranks.index(readers.ranks[0]))]
        link = min(processes.all_gather(_time_broadcast(sample, readers, processes)))
        nodes = 1 if readers.temporary else len(everyone.ranks) / fewest
        if (divided := seconds_divided(nbytes, disk, link, nodes)) < seconds:
            best, seconds = readers, divided
    for readers in options:
        if readers.temporary and readers is not best:
            dist.destroy_process_group(readers.group)
    return replace(best, sampled=frozenset(sampled), disk_rate=disk, link_rate=link)


def seconds_alone(nbytes: float, disk: float, cache: float) -> float:
    """Of ranks that all read everything: ranks of a node get from its page cache what one of them has read.

    Args:
        disk: Bytes per second of a node.
        cache: Bytes per second at which a rank reads what the page cache has.
    """
    return nbytes / min(disk, cache)


def seconds_divided(nbytes: float, disk: float, link: float, nodes: float) -> float:
    """Of nodes that read a part each, and then broadcast it."""
    return nbytes / (nodes * disk) + nbytes / link


def _divisions(everyone: Readers, mesh: Mesh, processes: Processes) -> list[Readers]:
    """Who could divide the reading: the replicas on a node, where nodes have several and there are others; or all."""
    groups = [
        ranks
        for column in mesh.base.mesh.T.tolist()
        for node in sorted(set(mesh.nodes))
        if (ranks := [rank for rank in column if mesh.nodes[rank] == node])
    ]
    if len(set(mesh.nodes)) == 1 or max(map(len, groups)) == 1:
        return [everyone]
    group = own_group(groups, processes)
    return [Readers(tuple(dist.get_process_group_ranks(group)), group, temporary=True), everyone]


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


def _time_broadcast(parts: Sequence[Part], readers: Readers, processes: Processes) -> float:
    """Bytes per second of what the first of them has read; infinite for nothing. The first, small one connects them."""
    assert readers.group is not None
    if len(readers.ranks) == 1:
        parts = []
    tensors = [tensor for part in parts for tensor in part.tensors]
    _broadcast([tensor.view(-1)[:1] for tensor in tensors[:1]], readers.ranks[0], readers.group)
    dist.barrier(group=processes.control)
    began = time.perf_counter()
    _broadcast(tensors, readers.ranks[0], readers.group)
    return _rate(sum(tensor.nbytes for tensor in tensors), time.perf_counter() - began)


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
