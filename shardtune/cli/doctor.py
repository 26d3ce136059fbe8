"""`shardtune doctor [CONFIG]`: is this machine, and are all nodes together, fit for the run?"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import InsecureNetwork, MasterAddr, MasterPort, Nnodes, NodeRank, Nproc, Overrides


def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)
    ] = None,
    override: Overrides = None,
    nproc: Nproc = "auto",
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    insecure_network: InsecureNetwork = False,
    grace: Annotated[
        float | None,
        typer.Option("--grace", metavar="SECONDS", min=1, help="Between the scheduler's SIGTERM and its SIGKILL."),
    ] = None,
    this_node: Annotated[
        bool,
        typer.Option("--this-node", help="Check this node only, as one of the run's: for an init container."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check this machine: packages, GPUs, limits, networks, disks, memory, variables; with CONFIG, for that run.

    With the node options of `train`, on every node: results are gathered, differences are named, and the links between
    all processes are timed. With --this-node no other node is waited for. Trains nothing and writes nothing but a small
    file at the output, which it removes.

    Exit codes: 0 fit (also with warnings); 1 a check failed; 2 invalid input.
    """
    from shardtune.config import load_config
    from shardtune.doctor.finding import NodeReport, fail
    from shardtune.doctor.needs import plan_needs
    from shardtune.doctor.nodes import Examination, examine
    from shardtune.doctor.run import job_for, make_checks
    from shardtune.doctor.system import System
    from shardtune.errors import UserInputError
    from shardtune.launch.network import INSECURE_VARIABLE, read_network
    from shardtune.launch.process_role import Node, NodeOptions, detect_role, this_node_alone
    from shardtune.launch.safe_defaults import set_safe_defaults

    set_safe_defaults(os.environ)
    if nproc != "auto" and not (nproc.isdigit() and int(nproc)):
        raise UserInputError(f"--nproc is '{nproc}', not a number of processes.", fix="Give 1 or more, or auto.")
    if insecure_network:
        os.environ[INSECURE_VARIABLE] = "1"
    options = NodeOptions(nnodes, node_rank, master_addr, master_port)
    if this_node and options != NodeOptions():
        raise UserInputError(
            "--this-node does not go with --nnodes, --node-rank, --master-addr and --master-port.",
            fix="Leave out --this-node to check all nodes together.",
        )
    resolved = load_config(config, list(override or ()), None, os.environ) if config is not None else None
    if this_node:
        node = this_node_alone(os.environ, resolved.config.cluster.nodes if resolved else 1)
        network = read_network(os.environ, Node())
    else:
        role = detect_role(os.environ, options)
        node = role if isinstance(role, Node) else Node()  # one rank of another launcher sees its own machine
        network = read_network(os.environ, node)
    system = System()
    job = job_for(system, resolved.config if resolved else None, node, nproc, grace)
    findings = []
    try:
        job = replace(job, needs=plan_needs(resolved, system, job) if resolved else None)
    except UserInputError as error:
        findings.append(fail("plan", " ".join(filter(None, (error.what, error.why))), error.fix))
    findings += make_checks(system, job)
    if this_node:
        job = replace(job, node=Node())  # its own links are timed
    if job.node.nnodes * job.nproc > 1:
        examination = examine(system, job, findings, network, _log)
    else:
        examination = Examination((NodeReport(0, socket.gethostname(), tuple(findings)),))
    if as_json:
        from shardtune.doctor.page import as_json as to_json

        print(json.dumps(to_json(examination), indent=1))
    else:
        from rich.console import Console

        from shardtune.doctor.page import show

        show(Console(), examination)
    raise typer.Exit(int(examination.verdict == "fail"))


def _log(text: str) -> None:
    print(f"doctor: {text}", file=sys.stderr, flush=True)
