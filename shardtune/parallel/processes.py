"""Which rank is this, on which device, and how do ranks communicate? The process group of a run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from shardtune.config.schema import ParallelSection
from shardtune.errors import UserInputError
from shardtune.parallel import exchange
from shardtune.parallel.interface import choose_interface

T = TypeVar("T")
_MARGIN = timedelta(minutes=1)


@dataclass(frozen=True)
class Processes:
    """This rank's place in the run.

    Attributes:
        control: A gloo group for flags and JSON: it never waits for a GPU.
        nodes: The node of every rank, numbered in the order of ranks.
        timeout: Of a collective.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    nodes: tuple[int, ...]
    timeout: timedelta

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def agree(self, flag: bool) -> bool:
        """True on every rank if it is true on any."""
        return self.agree_each([flag])[0]

    def agree_each(self, flags: list[bool]) -> list[bool]:
        """Each is true on every rank if it is true on any."""
        if self.world_size == 1:
            return flags
        votes = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return [bool(vote) for vote in votes.tolist()]

    def share_from_main(self, value: T) -> T:
        """Rank 0's `value`, on every rank. What JSON would alter (`exchange.to_bytes`) raises, also on a lone rank."""
        shared: T = exchange.broadcast(value, self.control)
        return shared

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` on rank 0, by rank; empty elsewhere. JSON as above."""
        return exchange.gather(value, self.control, everywhere=False)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's `value` on every rank, by rank. JSON as above."""
        return exchange.gather(value, self.control, everywhere=True)

    def wait_for_all(self, name: str, beat: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has come to `name`, however long it takes; a collective would give up on one.

        Args:
            beat: Called again and again while waiting.
        """
        if self.world_size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        store.set(f"shardtune/{name}/{self.rank}", "here")
        everyone = [f"shardtune/{name}/{rank}" for rank in range(self.world_size)]
        while not store.check(everyone):  # store.wait would keep Python from noticing a signal until it returns
            beat()
            time.sleep(0.1)


@contextmanager
def join(section: ParallelSection) -> Iterator[Processes]:
    """Join the run's process group as the rank the environment names (a lone process makes a group of one)."""
    kind = device_type(section)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = collective_timeout(section)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    # accelerate would open the group without a timeout on CPU (its ddp_timeout does not reach gloo).
    if world_size > 1:
        choose_interface(os.environ)
        dist.init_process_group(
            backend,
            store=_launchers_store(timedelta(minutes=section.load_timeout_minutes)),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if kind == "cuda" else None,
        )
    else:
        store = HashStore()  # no port is opened for a group of one
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else dist.group.WORLD
    assert control is not None
    yield Processes(rank, local_rank, world_size, device, control, _nodes(control), timeout)
    # Only after success: with a rank in trouble, leaving the group politely can wait for it for ever.
    dist.destroy_process_group()


def _nodes(control: dist.ProcessGroup) -> tuple[int, ...]:
    """By the launcher's number and the host: launchers may share a host, and not every launcher numbers its nodes."""
    names = exchange.gather(f"{os.environ.get('GROUP_RANK', '')}@{socket.gethostname()}", control, everywhere=True)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def collective_timeout(section: ParallelSection) -> timedelta:
    """Of a collective itself: longer than any phase, so that the watchdog, which knows who and why, comes first."""
    longest = max(section.load_timeout_minutes, section.step_timeout_minutes, section.checkpoint_timeout_minutes)
    return timedelta(minutes=longest) + _MARGIN


def _launchers_store(timeout: timedelta) -> Store | None:
    """Our launcher's store, which outlives every rank; None under other launchers (torch then asks the environment).

    On the master it is there itself, on other nodes the launcher hands the connection on.
    """
    prefix = os.environ.get("SHARDTUNE_STORE_PREFIX")
    if prefix is None:
        return None
    store = TCPStore("127.0.0.1", int(os.environ["SHARDTUNE_STORE_PORT"]), None, False, timeout)
    return PrefixStore(prefix, store)


def device_type(section: ParallelSection) -> str:
    """Where a run computes on this machine: cpu or cuda."""
    if section.device == "cuda" and not torch.cuda.is_available():
        raise UserInputError(
            "parallel.device is cuda, but torch sees no CUDA device here.",
            why=f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none: a CPU build)'}.",
            fix="Set parallel.device to auto or cpu, or install a CUDA build of torch and check nvidia-smi.",
        )
    if section.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return section.device
