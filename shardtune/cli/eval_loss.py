"""`shardtune eval-loss CONFIG`: evaluates without training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    RunsDir,
    Verbose,
)

if TYPE_CHECKING:
    from shardtune.launch.process_role import Node, Worker


def eval_loss(
    config: Config,
    adapter: Annotated[
        Path | None,
        typer.Option(
            "--adapter",
            metavar="RUN|PATH",
            help="A run's id (or a unique prefix) or folder, its final/, a checkpoint, or any PEFT adapter that "
            "matches the `lora` section; default: none.",
        ),
    ] = None,
    runs_dir: RunsDir = None,
    override: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")] = False,
    nproc: Nproc = "",
    accelerate_config: AccelerateConfig = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    insecure_network: InsecureNetwork = False,
    force: Force = False,
    verbose: Verbose = False,
) -> None:
    """Compute the loss on the validation rows (data.val_split), exactly as training with the same CONFIG does.

    Mean per supervised token over all ranks, for the base model or with an adapter. Leaves no run folder behind.

    Exit codes: the same as `shardtune train` (docs/exit-codes.md).
    """
    from shardtune.launch.network import INSECURE_VARIABLE
    from shardtune.launch.process_role import NodeOptions, detect_role
    from shardtune.launch.rank_process import exit_process
    from shardtune.launch.start import start
    from shardtune.observe.output import ignore_write_errors
    from shardtune.run.evaluation import Evaluation
    from shardtune.terminal import VERBOSE_VARIABLE

    overrides = [*(override or ()), "train.report_to=none"]
    if nproc:
        overrides.append(f"parallel.nproc={nproc}")
    if verbose:
        os.environ[VERBOSE_VARIABLE] = "1"
    if insecure_network:
        os.environ[INSECURE_VARIABLE] = "1"
    options = NodeOptions(nnodes, node_rank, master_addr, master_port)
    wanted = Evaluation(_adapter(adapter, runs_dir, detect_role(os.environ, options)), as_json)
    with ignore_write_errors():
        code = start(config, overrides, accelerate_config, None, os.environ, options, force=force, evaluation=wanted)
    exit_process(code)


def _adapter(given: Path | None, runs_dir: Path | None, role: Node | Worker) -> Path | None:
    """Resolves a run's id to its folder where the adapter is read: on rank 0, or on the node that has it."""
    from shardtune.errors import UserInputError
    from shardtune.inference.source import folder_in_run
    from shardtune.launch.process_role import Worker
    from shardtune.report.runs import is_run_path

    rank = role.rank if isinstance(role, Worker) else role.node_rank
    if given is None or rank > 0 or given.expanduser().exists() or not is_run_path(str(given)):
        return given
    try:
        return folder_in_run(str(given), runs_dir)
    except UserInputError as error:
        raise UserInputError(
            f"--adapter: '{given}' does not exist. {error.what}", why=error.why, fix=error.fix
        ) from None
