"""Do replicas hold the same weights? Checksums over the ranks that hold the same rows; the odd one out is named."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardtune.errors import MachineError, ShardtuneError
from shardtune.model.shard_reader import ShardReader
from shardtune.model.weight_loading import load_shards, local_shards, unwrapped_name
from shardtune.terminal import count
from shardtune.train.divided_reading import split
from shardtune.train.proof import checksum, local

if TYPE_CHECKING:
    from torch import nn

    from shardtune.observe.events import EventLog
    from shardtune.parallel.processes import Processes
    from shardtune.train.setup import Setup

Sums = Mapping[str, Hashable]


@dataclass(frozen=True)
class Difference:
    """A tensor of which ranks that should hold the same hold different values.

    Attributes:
        ranks: That hold these rows.
        odd: Those that differ from the majority; all, if there is none.
    """

    name: str
    ranks: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def has_majority(self) -> bool:
        return len(self.odd) < len(self.ranks)


def differences(groups: Sequence[Sequence[int]], sums: Sequence[Sums]) -> list[Difference]:
    """Args:
    groups: Ranks that hold the same rows.
    sums: Each rank's checksums, by the tensor's name.
    """
    found = []
    for ranks in groups:
        for name in sums[ranks[0]]:
            values = {rank: sums[rank].get(name) for rank in ranks}
            (most, times), *others = Counter(values.values()).most_common()
            if others:
                majority = 2 * times > len(ranks)
                odd = tuple(rank for rank in ranks if not majority or values[rank] != most)
                found.append(Difference(name, tuple(ranks), odd))
    return found


class ReplicaCheck:
    """Compares what replicas hold at the start, and every `guards.replica_check_steps` steps.

    What trains is compared where it is replicated, too. Ranks exchange one digest each; names are exchanged only when
    digests differ. Each rank then reads the first such tensor again, which tells memory from files.

    Raises, on all ranks together: ShardtuneError where the files differ, since a restart would end the same way;
    MachineError otherwise.
    """

    def __init__(self, setup: Setup, processes: Processes, events: EventLog) -> None:
        self.setup, self.processes, self.events = setup, processes, events
        self.mesh = setup.sharding.mesh
        self.every = setup.config.guards.replica_check_steps if self.mesh.replicas > 1 else 0
        self.passed: int | None = None  # the step of the last check

    def begin(self, frozen: Sums, step: int) -> None:
        """Args:
        frozen: Checksums of the frozen parameters, as they were just taken.
        step: The last one that was done.
        """
        if self.mesh.replicas > 1:
            self._compare({**frozen, **self._other_sums()}, step)

    def end_step(self, step: int) -> None:
        """A collective on the steps of a check."""
        if self.every and step % self.every == 0:
            frozen = {name: checksum(p) for name, p in self.setup.model.named_parameters() if not p.requires_grad}
            self._compare({**frozen, **self._other_sums()}, step)

    def _other_sums(self) -> dict[str, int]:
        """Of buffers, and of what trains where other ranks hold the same of it."""
        model, sums = self.setup.model, {}
        if not self.mesh.splits_adapters_only:
            sums = {name: checksum(p) for name, p in model.named_parameters() if p.requires_grad}
        recomputed = {name for name, module in model.named_modules() if _recomputed_in_forward(module)}
        buffers = ((name, b) for name, b in model.named_buffers() if name.rpartition(".")[0] not in recomputed)
        return sums | {name: checksum(buffer) for name, buffer in buffers}

    def _compare(self, sums: Sums, step: int) -> None:
        groups = self.mesh.base.mesh.T.tolist()
        digest = hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()
        digests = self.processes.all_gather(digest)
        if all(digests[rank] == digests[ranks[0]] for ranks in groups for rank in ranks):
            self.passed = step
            return
        found = differences(groups, self.processes.all_gather(dict(sums)))
        mine = self._read_again(found[0].name) if self.processes.rank in found[0].ranks else None
        read = self.processes.all_gather(mine)
        hosts = self.processes.all_gather(socket.gethostname())
        places = [f"node {node}, {host}" for node, host in zip(self.mesh.nodes, hosts, strict=True)]
        trains = self._tensor(found[0].name).requires_grad
        verdict = _explain(found, read, places, trains=trains)
        when, since = "before the first step", ""
        if self.passed is not None:
            when = f"at step {step}"
            since = f" They were last equal at step {self.passed}: later checkpoints may have been trained wrongly."
        what = f"Replicas differ {when}: {verdict.sentence}"
        if self.processes.is_main:
            self.events.write("guard", guard="replicas", step=step, action="stop", text=what, ranks=list(verdict.ranks))
        raise verdict.kind(what, why=verdict.why, fix=verdict.fix + since, code="replicas-differ")

    def _tensor(self, name: str) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = dict(self.setup.model.named_parameters())
        return (tensors | dict(self.setup.model.named_buffers()))[name]

    def _read_again(self, name: str) -> list[list[int]] | None:
        """Checksums of a tensor of the checkpoint in memory and in this rank's files; None if it cannot be read."""
        model, mapping = self.setup.model, self.setup.meta_model.mapping
        held = self._tensor(name)
        if self.setup.strategy in ("random", "rank0-broadcast") or held.requires_grad:
            return None
        place = local(held).data_ptr()
        shards = [
            shard
            for shard in local_shards(model, mapping)
            if place in (shard.into.data_ptr(), shard.scale_into.data_ptr() if shard.scale_into is not None else None)
        ]
        memory, files = [], []
        try:
            with ShardReader(mapping) as reader:
                for part in split(shards, reader):  # in parts: a device may have no memory left for a whole one
                    into, *scale = [torch.empty_like(tensor) for tensor in part.tensors]
                    load_shards([replace(part.shard, into=into, scale_into=scale[0] if scale else None)], reader)
                    memory += [checksum(tensor) for tensor in part.tensors]
                    files += [checksum(tensor) for tensor in (into, *scale)]
        except (OSError, ShardtuneError):
            return None  # the files are gone: it is reported as not known
        return [memory, files] if shards else None


class _Verdict(NamedTuple):
    kind: type[ShardtuneError]
    ranks: tuple[int, ...]  # at fault
    sentence: str
    why: str
    fix: str


def _explain(
    found: Sequence[Difference], read: Sequence[list[list[int]] | None], places: Sequence[str], *, trains: bool
) -> _Verdict:
    """Whose values are wrong, and whether memory or a file is at fault.

    Args:
        read: Of the first difference, by rank: its checksums in memory and in the rank's files.
        places: Node and host of each rank.
        trains: What differs first is trained.
    """
    first = found[0]
    others = len({one.name for one in found}) - 1
    what = f"'{first.name if trains else unwrapped_name(first.name)}'"
    what += f" and {count(others, 'other tensor')}" if others else ""
    files = {rank: tuple(both[1]) for rank in first.ranks if (both := read[rank]) is not None}
    if len(set(files.values())) > 1:
        (blamed,) = differences([list(files)], [{first.name: files.get(rank)} for rank in range(len(read))])
        return _Verdict(
            ShardtuneError,
            blamed.odd,
            _sentence(blamed, what, places),
            "The files of the model have different values there: one is damaged, or another version.",
            _fix_files(blamed, places),
        )
    changed = tuple(rank for rank in files if (both := read[rank]) is not None and both[0] != both[1])
    if changed:
        first = replace(first, odd=changed)
        why = f"The files have the same values everywhere; the memory of {_named(changed, places)} differs from them."
    elif trains:
        why = "They got the same gradients, so one of them has computed or stored something wrong."
    else:
        why = "No rank could compare its memory with the files."
    fix = (
        "Check the memory and the GPU of that machine (nvidia-smi -q -d ECC), and leave it out if this happens again. "
        "A restart reads the weights again (--max-restarts)."
    )
    return _Verdict(MachineError, first.odd, _sentence(first, what, places), why, fix)


def _fix_files(blamed: Difference, places: Sequence[str]) -> str:
    """rank0-broadcast would send the damaged file to all, if it is rank 0's."""
    if blamed.has_majority:
        text = f"Copy the model's files to {_named(blamed.odd, places)} again, from another node."
        return (
            text if 0 in blamed.odd else f"{text} Or set model.load: rank0-broadcast: no other node's files are read."
        )
    return (
        f"Compare the sha256 of the model's files on {_named(blamed.odd, places)} with those of their source, and copy "
        "the wrong ones again."
    )


def _sentence(difference: Difference, what: str, places: Sequence[str]) -> str:
    ranks = _named(difference.odd, places)
    if not difference.has_majority:
        return f"{ranks} have different values of {what}."
    return f"{ranks} {'has' if len(difference.odd) == 1 else 'have'} other values of {what} than the other replicas."


def _named(ranks: Sequence[int], places: Sequence[str]) -> str:
    return " and ".join(f"rank {rank} ({places[rank]})" for rank in ranks)


def _recomputed_in_forward(module: nn.Module) -> bool:
    """RoPE whose frequencies follow the length of a rank's own rows: its buffers differ between healthy ranks."""
    kinds = str(getattr(module, "rope_type", ""))
    return "dynamic" in kinds or "longrope" in kinds
