"""Does this launch have the machines and processes that accelerate's file expects? If not, the batch size differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardtune.config import ResolvedConfig
from shardtune.config.batch import effective_batch
from shardtune.errors import UserInputError
from shardtune.launch.process_role import NodeOptions, says_how_many_nodes


def refuse_lone_machine(
    resolved: ResolvedConfig, environ: Mapping[str, str], options: NodeOptions, config: Path
) -> None:
    """Refuse a file for several machines when neither --nnodes nor a scheduler says how many there are.

    accelerate would wait for the others. Training on without them uses a fraction of the batch, and the same command
    on every machine starts as many independent runs.

    Raises:
        UserInputError: with the command for each machine, and the one for this machine alone.
    """
    machines = _machines(resolved)
    if machines == 1 or says_how_many_nodes(environ, options):
        return
    here, file = resolved.config.parallel.nproc, resolved.config.parallel.accelerate_config or "fsdp.yaml"
    train = resolved.config.train
    is_fixed = train.effective_batch_size is not None  # the same on any number of processes
    why = f"This command alone would train with 1/{machines} of the processes"
    if isinstance(here, int) and not is_fixed:
        batch = _batch(resolved, here)
        why += f": {batch} rows per step instead of {batch * machines}"
    accumulation = train.gradient_accumulation_steps
    alone = "--nnodes 1"
    if isinstance(accumulation, int) and not is_fixed:
        more = f"-o train.gradient_accumulation_steps={accumulation * machines}"
        alone += f", with {more} for the same number of rows per step"
    raise UserInputError(
        f"{Path(file).name} sets num_machines: {machines}, but the node rank of this machine is not set.",
        why=f"{why}.",
        fix=f"On each machine: shardtune train {config} --accelerate-config {file} --nnodes {machines} "
        "--node-rank R --master-addr HOST (R from 0, HOST is the address of machine 0; docs/multi-node.md). To train "
        f"on this machine alone: {alone}.",
    )


def other_process_count(resolved: ResolvedConfig, world_size: int) -> str | None:
    """A notice when the number of processes differs from the file's: per-rank settings stay, so the batch changes."""
    nproc = resolved.config.parallel.nproc
    if resolved.origins["parallel.nproc"].source != "accelerate" or not isinstance(nproc, int):
        return None
    expected = nproc * _machines(resolved)
    if expected == world_size:
        return None
    rows = ""
    if resolved.config.train.effective_batch_size is None:
        rows = f": {_batch(resolved, world_size)} rows per step instead of {_batch(resolved, expected)}"
    return (
        f"accelerate's file sets num_processes: {expected}, but this run has {world_size}{rows}. The learning rate and "
        "all other settings are unchanged."
    )


def _machines(resolved: ResolvedConfig) -> int:
    """The number in accelerate's file; 1 without a file, or where the user's own cluster.nodes overrides it."""
    from_accelerate = resolved.origins["cluster.nodes"].source == "accelerate"
    return resolved.config.cluster.nodes if from_accelerate else 1


def _batch(resolved: ResolvedConfig, processes: int) -> int:
    return effective_batch(resolved.config.train, processes)
