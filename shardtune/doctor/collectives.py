"""How fast are the links between ranks, and what do they run over? One rank of a timed all-reduce and all-gather.

Started by `nodes` on every node, as `python -m shardtune.doctor.collectives`. Rank 0 writes what all have measured.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardtune.config.schema import ParallelSection
from shardtune.errors import MachineError
from shardtune.launch.rank_process import run_as_rank
from shardtune.run.channel import end_with_launcher
from shardtune.run.stop_request import StopRequest

RESULT_VARIABLE, DEVICE_VARIABLE = "SHARDTUNE_DOCTOR_RESULT", "SHARDTUNE_DOCTOR_DEVICE"
_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_REPEATS = 3
_MINUTES = 2.0  # for anything that ranks wait for
_VIA = re.compile(r"Channel \d+/\d+ : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[\w+\])? via (\S+)")


class Link(NamedTuple):
    """Ranks that are timed together. Links of one phase are timed at the same time and share no rank."""

    name: str
    phase: int
    ranks: tuple[int, ...]


def links_of(nodes: Sequence[int]) -> list[Link]:
    """All ranks; those within each node; those of neighbouring nodes, around a ring, by their number on the node.

    Args:
        nodes: The node of every rank.
    """
    members = {node: [rank for rank, at in enumerate(nodes) if at == node] for node in dict.fromkeys(nodes)}
    found = [Link("all ranks", 0, tuple(range(len(nodes))))]
    found += [Link(f"within node {node}", 1, tuple(ranks)) for node, ranks in members.items() if len(ranks) > 1]
    order = list(members)
    neighbours = list(zip(order, order[1:] + order[:1], strict=True))
    for index, (one, other) in enumerate(neighbours if len(order) > 2 else neighbours[: len(order) - 1]):
        # Around an odd ring the last pair shares a node with both kinds of neighbours.
        phase = 4 if index == len(order) - 1 and len(order) % 2 else 2 + index % 2
        for ranks in zip(members[one], members[other], strict=False):
            found.append(Link(f"node {one} – node {other}", phase, ranks))
    return found


def transports(log: str, nodes: Sequence[int]) -> dict[str, list[str]]:
    """What NCCL says that its channels run over (`NET/IB/GDRDMA`, `NET/Socket`, `P2P/CUMEM`, `SHM`), by place."""
    found: dict[str, set[str]] = {}
    for one, other, via in _VIA.findall(log):
        place = "within a node" if nodes[int(one)] == nodes[int(other)] else "between nodes"
        kind, *words = via.split("/")
        kept = [word for word in words if not word.isdigit() and word not in ("Shared", "direct")]
        found.setdefault(place, set()).add("/".join([kind, *dict.fromkeys(kept)]))
    return {place: sorted(kinds) for place, kinds in found.items()}


def _measure(stop: StopRequest) -> int:
    import torch
    import torch.distributed as dist

    from shardtune.parallel.processes import join

    log = _redirect_stdout()
    kind = os.environ[DEVICE_VARIABLE]
    section = ParallelSection.model_validate(
        {"device": kind, **{f"{what}_timeout_minutes": _MINUTES for what in ("load", "step", "checkpoint")}}
    )
    with join(section) as processes:
        links, timed, seen = links_of(processes.nodes), [], ""
        for phase in range(5):
            groups = [(link, dist.new_group(list(link.ranks))) for link in links if link.phase == phase]
            for link, group in groups:
                if processes.rank in link.ranks:
                    speeds = _time_link(torch, group, processes.device)
                    timed.append([link.name, link.ranks[0], len(link.ranks), *speeds])
            dist.barrier(processes.control)
            if phase == 0:  # in the log of a smaller group, ranks have other numbers
                seen = _read(log)
        diagnostics = list(dict.fromkeys(re.findall(r"NCCL DIAG\s+(\[.*)", _read(log))))
        mine = {"timed": timed, "transports": transports(seen, processes.nodes), "diagnostics": diagnostics}
        everyone = processes.gather(mine)
        if processes.is_main:
            Path(os.environ[RESULT_VARIABLE]).write_text(json.dumps(_together(everyone, kind)), encoding="utf-8")
    return 0


def _redirect_stdout() -> Path:
    """NCCL writes its log and its diagnostics to standard output: from here on that is a file."""
    log = Path(os.environ[RESULT_VARIABLE]).with_name(f"rank-{os.environ['RANK']}.log")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    return log


def _read(log: Path) -> str:
    ctypes.CDLL(None).fflush(None)  # what C has written to standard output and still keeps
    return log.read_text(encoding="utf-8", errors="replace")


def _time_link(torch: Any, group: Any, device: Any) -> list[float]:
    """Bus bandwidths of an all-reduce and an all-gather, bytes per second, as nccl-tests counts them."""
    dist, count = torch.distributed, torch.distributed.get_world_size(group)
    size = _BYTES[device.type] // 4 // count * count
    values = torch.ones(size, dtype=torch.float32, device=device)
    dist.all_reduce(values, group=group)
    if not bool((values == count).all()):
        raise MachineError(
            f"An all-reduce over {count} ranks returned wrong numbers.", why="Every element must be their number.",
            fix="Check the GPUs (gpu.peer access, gpu.memory errors) and the links of these nodes.",
        )  # fmt: skip
    piece, bytes_ = torch.ones(size // count, dtype=torch.float32, device=device), 4 * size
    # Its name from torch 2.13 on, where the old one warns.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_seconds = _best(torch, lambda: dist.all_reduce(values, group=group), group, device)
    gather_seconds = _best(torch, lambda: all_gather(values, piece, group=group), group, device)
    share = (count - 1) / count
    return [2 * share * bytes_ / reduce_seconds, share * bytes_ / gather_seconds]


def _best(torch: Any, operation: Callable[[], Any], group: Any, device: Any) -> float:
    found = []
    for _ in range(_REPEATS + 1):  # the first one connects
        torch.distributed.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-9)


def _together(everyone: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Of every group of ranks its slowest one; groups that make up one link send at the same time and add up."""
    groups: dict[tuple[str, int], list[float]] = {}
    numbers: dict[str, int] = {}
    for name, first, count, *speeds in (row for one in everyone for row in one["timed"]):
        known = groups.get((name, first), speeds)
        groups[name, first] = [min(pair) for pair in zip(known, speeds, strict=True)]
        numbers[name] = count
    links: dict[str, list[float]] = {}
    for (name, _), speeds in groups.items():
        links[name] = [sum(pair) for pair in zip(links.get(name, [0.0, 0.0]), speeds, strict=True)]
    places = {place for one in everyone for place in one["transports"]}
    return {
        "backend": "nccl" if kind == "cuda" else "gloo",
        "links": [
            {"link": name, "ranks": numbers[name], "all_reduce": speeds[0], "all_gather": speeds[1]}
            for name, speeds in links.items()
        ],
        "transports": {
            place: sorted({via for one in everyone for via in one["transports"].get(place, [])})
            for place in sorted(places)
        },
        "diagnostics": [line for one in everyone for line in one["diagnostics"]],
    }


if __name__ == "__main__":
    end_with_launcher()
    sys.exit(run_as_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _measure))
