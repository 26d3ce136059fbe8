"""`shardtune train CONFIG`: words for starting a run here, or for being one of its workers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shardtune.cli.options import AccelerateConfig, Config, Overrides


def train(
    config: Config,
    override: Overrides = None,
    nproc: Annotated[
        str, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto = one per GPU, else one.")
    ] = "",
    accelerate_config: AccelerateConfig = None,
    debug_freq: Annotated[
        int | None, typer.Option("--debug-freq", metavar="N", help="Short for -o train.debug_freq=N.")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id", metavar="NAME", help="Folder of the run under train.output_dir; default: date and time."
        ),
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option("--nnodes", metavar="N", min=1, help="Machines; start the same command on each.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="R", help="Number of this machine, from 0.")
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="Address of machine 0.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port", metavar="PORT", min=0, max=65535, help="Port machine 0 listens on; default 29500."
        ),
    ] = None,
    insecure_network: Annotated[
        bool,
        typer.Option(
            "--insecure-network",
            help="Let several machines meet without SHARDTUNE_SECRET, on a network where everyone is trusted.",
        ),
    ] = False,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", metavar="N", help="Short for -o parallel.max_restarts=N.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|latest|best|never|PATH", help="Short for -o train.resume=…."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start more processes than this machine has memory or cores for.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all that is known before the first step.")
    ] = False,
) -> None:
    """Train a LoRA adapter as CONFIG says, sharded over the processes of this machine, or of several.

    A run that was interrupted goes on where its last checkpoint is, when the same config is started again.

    Under torchrun, accelerate launch or a scheduler's RANK/WORLD_SIZE it becomes one of their workers.

    Exit codes: 0 done; 1 failed; 2 wrong input, nothing was trained; 75 preempted by SIGTERM or SIGUSR1, checkpoint
    saved: start it again; 130 stopped by Ctrl-C; 69 a node was lost; 71 a GPU ran out of memory; 76 a rank hung
    (docs/exit-codes.md).
    """
    from shardtune.launch.ending import leave
    from shardtune.launch.network import INSECURE_VARIABLE
    from shardtune.launch.place import Asked
    from shardtune.launch.start import start
    from shardtune.observe.output import unstoppable_output
    from shardtune.observe.summary import VERBOSE_VARIABLE

    overrides = list(override or ())
    if nproc:
        overrides.append(f"parallel.nproc={nproc}")
    if debug_freq is not None:
        overrides.append(f"train.debug_freq={debug_freq}")
    if resume is not None:
        overrides.append(f"train.resume={resume}")
    if max_restarts is not None:
        overrides.append(f"parallel.max_restarts={max_restarts}")
    if verbose:
        os.environ[VERBOSE_VARIABLE] = "1"
    if insecure_network:
        os.environ[INSECURE_VARIABLE] = "1"
    asked = Asked(nnodes, node_rank, master_addr, master_port)
    with unstoppable_output():
        code = start(config, overrides, accelerate_config, run_id, os.environ, asked, force=force)
    leave(code)
