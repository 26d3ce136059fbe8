"""On which machines does the run stand? Each node looks at itself once; rank 0 tells its own and what differs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardtune.observe.hardware import describe_hardware
from shardtune.observe.hardware_summary import print_hw_summary
from shardtune.terminal import is_verbose
from shardtune.train.run_files import write_run_file

if TYPE_CHECKING:
    from shardtune.train.context import RunContext


def tell_machines(context: RunContext, *, workers: int) -> None:
    """Write a `hardware` event on every node and `environment.json` on rank 0, and say what differs between nodes and
    what is wrong (with -v: what there is). A collective.

    Args:
        workers: Processes that load data, for each rank.
    """
    processes = context.processes
    mine = describe_hardware(context.folder) if processes.local_rank == 0 else None  # one look for a whole node
    if mine is not None:
        context.events.write("hardware", **mine)
    found = processes.gather(json.loads(json.dumps(mine)))  # as the event has it: lists for tuples
    if not processes.is_main:
        return
    nodes = [facts for facts in found if facts is not None]
    write_run_file(context, "environment.json", json.dumps(nodes[0], indent=2) + "\n")
    others = {f"node {number} ({facts['host']})": facts for number, facts in enumerate(nodes[1:], start=1)}
    print_hw_summary(context.console, nodes[0], others, workers=workers, brief=not is_verbose())
