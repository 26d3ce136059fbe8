"""How do tests run ranks? Forked from one process that has imported the worker: what takes seconds is done once."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from running import REPOSITORY


def on_ranks(
    environment: dict[str, str], worker: Path, worlds: int | Sequence[int], *args: object, timeout: float = 400
) -> None:
    """Call `main(*args)` of the file `worker` on every rank; where there are several `worlds`, one after the other."""
    sizes = [worlds] if isinstance(worlds, int) else worlds
    paths = (REPOSITORY, REPOSITORY / "tests", worker.parent)
    result = subprocess.run(
        [sys.executable, __file__, str(worker), ",".join(map(str, sizes)), *map(str, args)],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]


def free_ports(count: int) -> list[int]:
    """Below those that outgoing connections get (from 32768 on): a connection of a test beside this one could take one
    of them before it is used."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(15000, 32000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] * (port not in ports)
    return ports


def _main(worker: str, worlds: str, *args: str) -> None:
    gc.disable()  # what is imported stays
    spec = importlib.util.spec_from_file_location(Path(worker).stem, worker)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    importlib.import_module("torch._dynamo")  # FSDP2 does, in every rank
    gc.freeze()
    gc.enable()
    fork = multiprocessing.get_context("fork")
    for world in map(int, worlds.split(",")):
        (port,) = free_ports(1)
        ranks = [
            fork.Process(target=_as_rank, args=(module.main, rank, world, port, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for rank, process in enumerate(ranks):
            process.join()
            if process.exitcode != 0:
                sys.exit(f"rank {rank} of {world} ended with {process.exitcode}")  # daemons: the others end with this


def _as_rank(main: Callable[..., None], rank: int, world: int, port: int, args: tuple[str, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    main(*args)


if __name__ == "__main__":
    _main(*sys.argv[1:])
