"""`shardtune train CONFIG`: starts a run, or is one of its workers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shardtune.cli.options import (
    AccelerateConfig,
    Config,
    Force,
    InsecureNetwork,
    MasterAddr,
    MasterPort,
    Nnodes,
    NodeRank,
    Nproc,
    Overrides,
    SkipPreflight,
    Verbose,
)


def train(
    config: Config,
    override: Overrides = None,
    nproc: Nproc = "",
    accelerate_config: AccelerateConfig = None,
    debug_freq: Annotated[
        int | None, typer.Option("--debug-freq", metavar="N", help="Short for -o train.debug_freq=N.")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id", metavar="NAME", help="Name of the run's folder in train.output_dir; default: date and time."
        ),
    ] = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    insecure_network: InsecureNetwork = False,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", metavar="N", help="Short for -o parallel.max_restarts=N.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|latest|best|never|PATH", help="Short for -o train.resume=…."),
    ] = None,
    force: Force = False,
    skip_preflight: SkipPreflight = False,
    verbose: Verbose = False,
) -> None:
    """Train a LoRA adapter with the settings in CONFIG, sharded over the processes of one or several machines.

    An interrupted run resumes from its last checkpoint when the same command is run again.

    Under torchrun, accelerate launch or a scheduler's RANK/WORLD_SIZE, this process is one of their workers.

    Exit codes: 0 done; 1 failed; 2 invalid input, nothing was trained; 69 a node
    was lost; 71 a GPU ran out of memory; 75 preempted by SIGTERM or SIGUSR1,
    checkpoint saved, run the same command again; 76 a rank hung; 130 stopped by
    Ctrl-C. All of them: docs/exit-codes.md.
    """
    from shardtune.doctor.run import preflight
    from shardtune.launch.network import INSECURE_VARIABLE
    from shardtune.launch.process_role import NodeOptions
    from shardtune.launch.rank_process import exit_process
    from shardtune.launch.start import start
    from shardtune.observe.output import ignore_write_errors
    from shardtune.terminal import VERBOSE_VARIABLE

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
    options = NodeOptions(nnodes, node_rank, master_addr, master_port)
    with ignore_write_errors():
        code = start(
            config, overrides, accelerate_config, run_id, os.environ, options, force=force,
            preflight=None if skip_preflight else preflight,
        )  # fmt: skip
    exit_process(code)
