"""From a script's command line to running ranks: checks first, then its folder, then the launcher."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path

from shardtune.config import ResolvedConfig
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.launch.launcher import launch
from shardtune.launch.network import read_network
from shardtune.launch.process_role import Node, NodeOptions, Worker, detect_role, refuse_lone_pod
from shardtune.launch.safe_defaults import set_safe_defaults
from shardtune.launch.script_ranks import ScriptRanks
from shardtune.launch.start import Preflight, announce, processes_of
from shardtune.observe.environment import command_line
from shardtune.run.folder import FOLDER_VARIABLE, check_run_id, new_run_id
from shardtune.script.command import ScriptCommand
from shardtune.script.folder import open_folder, record_end, record_start
from shardtune.script.rank import COMMAND_VARIABLE, LIMITS_VARIABLE
from shardtune.terminal import clock


def start_script(
    command: ScriptCommand,
    resolved: ResolvedConfig,
    name: str | None,
    environ: MutableMapping[str, str],
    options: NodeOptions,
    *,
    force: bool = False,
    show_all: bool = False,
    preflight: Preflight | None = None,
) -> int:
    """Run the script on every rank; returns the exit code.

    Args:
        name: Of the run's folder; None: date and time.
        force: Start more processes than this machine has memory or cores for.
        show_all: Print what all ranks print, not the first one alone.
        preflight: Raises if this machine is not fit for its processes; None checks nothing.
    """
    node = _node(environ, options)
    command.check()
    reasons = set_safe_defaults(environ)
    environ.pop(FOLDER_VARIABLE, None)  # of another run that this command was started in
    network, config = read_network(environ, node), resolved.config
    refuse_lone_pod(node, config.cluster.nodes, environ, options)
    nproc = processes_of(node, resolved, force=force)
    announce(node, nproc, network, environ, options, reasons)
    if preflight is not None:
        preflight(resolved, node, nproc, environ)
    with ExitStack() as at_end:
        folder = None
        if node.node_rank == 0:
            opened, has_begun = open_folder(config.train.output_dir, name, command, config.train.run_folder_access)
            at_end.callback(opened.lease.release)
            folder = opened.path
            record_start(folder, command)
            print(f"run       {_shown(folder)}{', started again' if has_begun else ''}", flush=True)
        elif name is not None:
            check_run_id(name, "--name")
        began = time.monotonic()
        ranks = ScriptRanks(
            output_dir=Path(config.train.output_dir).expanduser().absolute(),
            name=folder.name if folder is not None else name or new_run_id(),
            access=config.train.run_folder_access,
            show_all=show_all,
            settings={"the command after --": _digest(str(command)), "--name": _digest(name or "")},
            environment={LIMITS_VARIABLE: _limits(resolved), COMMAND_VARIABLE: command_line()},
        )
        program = [sys.executable, "-m", "shardtune.script", *command.words]
        try:
            code = launch(program, node, nproc, config, environ, ranks)
        except ShardtuneError as error:  # before any rank was started: nodes that do not fit together
            if folder is not None:
                record_end(folder, command, error.exit_code)
            raise
        if folder is not None:
            record_end(folder, command, code)
            took = clock(time.monotonic() - began)
            print(f"ended     exit code {code} after {took}; shardtune report {_shown(folder)}", flush=True)
        return code


def _node(environ: Mapping[str, str], options: NodeOptions) -> Node:
    """This machine as a node, which starts the ranks itself."""
    role = detect_role(environ, options)
    if isinstance(role, Node):
        return role
    if "LOCAL_RANK" in environ:
        raise UserInputError(
            "shardtune run was started by another launcher (LOCAL_RANK is set).",
            why="It starts the ranks itself: each rank of torchrun would start a whole run.",
            fix="Start it once for each node, without torchrun or accelerate launch; or run the script under those.",
        )
    return _lone_process(role, environ)


def _lone_process(role: Worker, environ: Mapping[str, str]) -> Node:
    """RANK and WORLD_SIZE alone: a scheduler has started one process for each pod."""
    if role.world_size == 1:
        return Node()
    return Node(role.world_size, role.rank, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), 1)


def _limits(resolved: ResolvedConfig) -> str:
    """What `rank` reads: seconds, and whether the user has set them."""
    parallel = resolved.config.parallel
    given = [
        int(resolved.origins[f"parallel.{key}"].source != "default")
        for key in ("load_timeout_minutes", "step_timeout_minutes")
    ]
    return f"{60 * parallel.load_timeout_minutes},{60 * parallel.step_timeout_minutes},{given[0]},{given[1]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shown(folder: Path) -> str:
    """Relative where that is shorter."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative
