"""`shardtune run -- script.py args`: any distributed PyTorch script, through the same launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shardtune.cli.options import (
    Force,
    InsecureNetwork,
    MasterAddr,
    MasterPort,
    Nnodes,
    NodeRank,
    Nproc,
    Overrides,
    SingleValues,
    SkipPreflight,
    Verbose,
)


class ScriptCommandLine(SingleValues):
    """Without `--`, options of the script would be taken for those of `shardtune run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        script = next((word for word in args if word.endswith(".py")), None)
        if "--" not in args and script is not None and not ctx.resilient_parsing:
            ctx.fail(f"The script stands behind two dashes: shardtune run [OPTIONS] -- {script} ARGS.")
        return list(super().parse_args(ctx, args))


def run(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT ARGS…", help="The script with its arguments, or -m MODULE with its own."),
    ] = None,
    nproc: Nproc = "",
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the run's folder; default: date and time. The same name goes on in the same folder.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Settings of the launcher and the cluster: docs/run.md."),
    ] = None,
    override: Overrides = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    insecure_network: InsecureNetwork = False,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", metavar="N", help="Short for -o parallel.max_restarts=N.")
    ] = None,
    show_all_ranks: Annotated[
        bool,
        typer.Option("--show-all-ranks", help="Print what every rank prints; default: the first rank of this machine."),
    ] = False,
    force: Force = False,
    skip_preflight: SkipPreflight = False,
    verbose: Verbose = False,
) -> None:
    """Run a PyTorch script on one or several processes and machines: started, checked, watched and recorded as `train`.

    Every rank runs the script in a Python process of its own, with torchrun's environment variables. What it prints is
    in logs/ of the run's folder. `from shardtune import observe` adds step times and metrics: docs/run.md.

    Exit codes: the script's own, of the rank that failed first; 0 done; 69 a node was lost; 75 stopped by SIGTERM;
    76 no progress within the deadline; 128 + signal for a rank that was killed. All of them: docs/exit-codes.md.
    """
    from shardtune.config.script_config import load_script_config
    from shardtune.doctor.run import preflight
    from shardtune.launch.network import INSECURE_VARIABLE
    from shardtune.launch.process_role import NodeOptions
    from shardtune.launch.rank_process import exit_process
    from shardtune.observe.output import ignore_write_errors
    from shardtune.script.command import ScriptCommand
    from shardtune.script.start import start_script
    from shardtune.terminal import VERBOSE_VARIABLE

    overrides = list(override or ())
    if nproc:
        overrides.append(f"parallel.nproc={nproc}")
    if max_restarts is not None:
        overrides.append(f"parallel.max_restarts={max_restarts}")
    if verbose:
        os.environ[VERBOSE_VARIABLE] = "1"
    if insecure_network:
        os.environ[INSECURE_VARIABLE] = "1"
    command = ScriptCommand.parse(script or ())
    resolved = load_script_config(config, overrides, os.environ)
    options = NodeOptions(nnodes, node_rank, master_addr, master_port)
    with ignore_write_errors():
        code = start_script(
            command, resolved, name, os.environ, options, force=force, show_all=show_all_ranks,
            preflight=None if skip_preflight else preflight,
        )  # fmt: skip
    exit_process(code)
