"""Where does this rank stand, and may it write there? The run's folder, agreed on and taken; what a run is made of."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shardtune.checkpoint.store import CheckpointStore
from shardtune.data.collate import Collator
from shardtune.data.order import Documents
from shardtune.errors import UserInputError
from shardtune.observe.events import EventLog
from shardtune.parallel.processes import Processes
from shardtune.run.folder import CHECKPOINTS, FOLDER_VARIABLE, join_run_folder
from shardtune.run.node_facts import STORE_VARIABLE, NodeFacts, differences, digests, versions
from shardtune.run.which_run import choose_run

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.run.stop_request import StopRequest
    from shardtune.run.watchdog import Watchdog
    from shardtune.train.memory.ledger import Ledger
    from shardtune.train.saving import CheckpointSaver
    from shardtune.train.setup import Setup


@dataclass(frozen=True)
class Data:
    """What the steps of a run are made of: rows or packs of rows, and how a batch is laid out."""

    train: Documents
    val: Documents | None
    collator: Collator

    @property
    def tokens(self) -> int:
        return self.train.prepared.counts.tokens


@dataclass(frozen=True)
class RunContext:
    """What every step of a run needs: this rank's place, the run's folder, and where to speak and write."""

    processes: Processes
    folder: Path
    console: Console  # quiet on all ranks but 0
    events: EventLog
    asked: RunConfig  # the config as it was given, before any `auto` was resolved
    temporary: bool = False  # the folder goes when this process ends
    held_files: dict[str, str] = field(default_factory=dict)  # as events are held: until the run goes on


@dataclass(frozen=True)
class Training:
    """What the training loop works with."""

    context: RunContext
    setup: Setup  # with its weights loaded
    saver: CheckpointSaver
    stop: StopRequest
    watchdog: Watchdog
    ledger: Ledger


def open_run(asked: RunConfig, processes: Processes, run_id: str | None, at_end: ExitStack) -> RunContext:
    """Agree on the run's folder. Our launcher has chosen one and holds it; otherwise rank 0 chooses, and holds it.

    Args:
        asked: The config as it was given: a run is found by it, whatever `auto` turns out to be here.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    console = Console(quiet=not processes.is_main)
    chosen = ""
    if given is None and processes.is_main:
        choice = choose_run(asked, run_id, processes.world_size)
        console.print(choice.notice, markup=False, highlight=False, soft_wrap=True, end="\n" if choice.notice else "")
        at_end.callback(choice.run_folder.lease.release)
        chosen = str(choice.folder)
    folder = Path(given or processes.share_from_main(chosen))
    join_run_folder(folder, asked.train.run_folder_access)
    # A start that is refused must not change what the run that it wanted to go on with looks like.
    has_trained = processes.is_main and bool(CheckpointStore(folder / CHECKPOINTS, None).steps())
    goes_on = processes.share_from_main(has_trained)
    return RunContext(processes, folder, console, EventLog(folder, processes.rank, deferred=goes_on), asked)


def refuse_different_nodes(processes: Processes, asked: RunConfig) -> None:
    """Our launchers have compared their nodes before they started anything; under others the ranks do it."""
    if processes.world_size == 1 or STORE_VARIABLE in os.environ:
        return
    mine = NodeFacts(processes.rank, processes.world_size, 1, versions=versions(), settings=digests(asked))
    everyone = processes.all_gather(asdict(mine))
    lines = differences([NodeFacts(**facts) for facts in everyone], "rank")
    if lines:
        raise UserInputError(
            "The ranks do not run the same thing.",
            why="; ".join(lines) + ".",
            fix="Use one image and one config file on all nodes.",
            code="nodes-differ",
        )


def refuse_different_data(processes: Processes, fingerprint: str) -> None:
    """Every rank prepares its node's files; ranks that hold other rows would train on other data unnoticed.

    Raises:
        UserInputError: with the same text on every rank; the ranks that differ from most are named.
    """
    everyone = processes.all_gather([socket.gethostname(), fingerprint])
    held: dict[str, list[str]] = {}  # who holds which data
    for rank, (host, found) in enumerate(everyone):
        held.setdefault(found, []).append(f"rank {rank} ({host})")
    if len(held) == 1:
        return
    most, *others = sorted(held.values(), key=len, reverse=True)
    what = "The ranks have prepared different data."
    if len(most) > len(others[0]):
        odd = ", ".join(name for names in others for name in names)
        what = f"Other data than on most ranks was prepared on {odd}."
    raise UserInputError(
        what,
        why="; ".join(f"fingerprint {found[:16]} on {', '.join(names)}" for found, names in held.items()) + ".",
        fix="Give every node the same files, or prepare once (shardtune data prepare) and copy the folder.",
        code="nodes-differ",
    )
