"""Does this launch have the machines and processes that accelerate's file counts on? If not, the batch is another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardtune.config import ResolvedConfig
from shardtune.errors import UserInputError
from shardtune.launch.place import Asked, says_how_many_nodes


def refuse_lone_machine(resolved: ResolvedConfig, environ: Mapping[str, str], asked: Asked, config: Path) -> None:
    """A file for several machines, started where nothing says that there are more than this one, or that it is alone.

    accelerate would wait for the others. A run that does not would train with a part of the batch; and started like
    that on every machine, as many runs at once.

    Raises:
        UserInputError: with the command for every machine, and the one for this machine alone.
    """
    machines = _machines(resolved)
    if machines == 1 or says_how_many_nodes(environ, asked):
        return
    here, file = resolved.config.parallel.nproc, resolved.config.parallel.accelerate_config or "fsdp.yaml"
    batch = _batch(resolved, here) if isinstance(here, int) else None
    why = f"This command alone would train with 1/{machines} of the processes"
    if batch is not None:
        why += f": {batch} rows a step instead of {batch * machines}"
    accumulation = resolved.config.train.gradient_accumulation_steps
    raise UserInputError(
        f"{Path(file).name} says num_machines: {machines}, and nothing says which of them this one is.",
        why=f"{why}.",
        fix=f"On each machine: shardtune train {config} --accelerate-config {file} --nnodes {machines} "
        "--node-rank R --master-addr HOST (R from 0, HOST is the address of machine 0; docs/multi-node.md). To train "
        "on this machine alone: --nnodes 1, with -o train.gradient_accumulation_steps="
        f"{accumulation * machines} for the same rows a step.",
    )


def other_process_count(resolved: ResolvedConfig, world_size: int) -> str | None:
    """A notice where other processes train than the file says: each rank's settings hold, so the batch is another."""
    nproc = resolved.config.parallel.nproc
    if resolved.origins["parallel.nproc"].source != "accelerate" or not isinstance(nproc, int):
        return None
    meant = nproc * _machines(resolved)
    if meant == world_size:
        return None
    return (
        f"accelerate's file says num_processes: {meant}, but {world_size} {'train' if world_size > 1 else 'trains'}: "
        f"{_batch(resolved, world_size)} rows a step instead of {_batch(resolved, meant)}. The learning rate and all "
        "other settings are used as they are."
    )


def _machines(resolved: ResolvedConfig) -> int:
    """What accelerate's file says; 1 where there is none, or the user's own cluster.nodes won over it."""
    said = resolved.origins["cluster.nodes"].source == "accelerate"
    return resolved.config.cluster.nodes if said else 1


def _batch(resolved: ResolvedConfig, processes: int) -> int:
    train = resolved.config.train
    return train.per_device_train_batch_size * train.gradient_accumulation_steps * processes
