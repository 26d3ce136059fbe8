"""What do the ranks of a user's script need that ours do not? A folder, logs, and torchrun's environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.launch.control_connection import ControlConnection, MasterConnection
from shardtune.launch.rank_output import RankOutput
from shardtune.launch.workers import RankAssignment
from shardtune.run.folder import FOLDER_VARIABLE, Access, join_run_folder

_NAME_KEY = "run"  # on the master's table
_CALL_SECONDS = 30.0


@dataclass(frozen=True)
class ScriptRanks:
    """Args:
    output_dir: Where the run's folder is, absolute.
    name: Of the folder, which node 0 has made and leased; the others learn it from node 0.
    settings: What all nodes have to have in common, by name, as digests.
    environment: Variables for every rank.
    """

    output_dir: Path
    name: str
    access: Access
    show_all: bool
    settings: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def publish(self, control: ControlConnection) -> None:
        """On the master, before any node has joined."""
        if isinstance(control, MasterConnection):
            control.table.set(_NAME_KEY, self.name)

    def folder(self, control: ControlConnection, idle: Callable[[], None]) -> Path:
        """The run's folder on this node, once all nodes have joined."""
        name = control.call(lambda table: table.get(_NAME_KEY), _CALL_SECONDS, idle)
        folder = self.output_dir / (name or self.name)
        join_run_folder(folder, self.access)
        return folder

    def output(self, folder: Path) -> RankOutput:
        return RankOutput(folder, show_all=self.show_all)

    def variables(self, assignment: RankAssignment, folder: Path, restarts: int) -> dict[str, str]:
        """What torchrun sets beside RANK and its like.

        The store of `init_process_group` is the launcher's own, reached over loopback on every node: no port of the
        master is open to others, and a rank that ends does not take the store with it.
        """
        return {
            **self.environment, FOLDER_VARIABLE: str(folder), "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(assignment.store_port),
            "GROUP_WORLD_SIZE": str(assignment.nnodes),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": folder.name,
            "TORCHELASTIC_RESTART_COUNT": str(assignment.attempt), "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        }  # fmt: skip

    def hint(self, step: int, folder: Path) -> str:
        return (
            f"\n  run: {folder} has a checkpoint of step {step}; the same command with --name {folder.name} finds it."
        )

    stopped = "Stopped before the script had asked observe.stop_requested(), which lets it save first (docs/run.md)."
