"""What does a run write beside events and checkpoints? A file that cannot be written costs a warning, never the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardtune.durable import replace_file
from shardtune.observe.hardware import describe_hardware
from shardtune.observe.hardware_summary import print_hw_summary
from shardtune.terminal import is_verbose, warn

if TYPE_CHECKING:
    from shardtune.train.context import RunContext


def write_run_file(context: RunContext, name: str, text: str) -> None:
    """Give a file of the run's folder this content; where there is no room for it, it keeps the one it has.

    As events, it waits where a run that has trained may yet refuse to go on with this start.
    """
    if context.events.deferred:
        context.held_files[name] = text
        return
    with warn_on_write_error(context, name):
        replace_file(context.folder / name, text)


def release_run_files(context: RunContext) -> None:
    """The run goes on: write what was held back, events and files."""
    context.events.release()
    for name, text in context.held_files.items():
        write_run_file(context, name, text)
    context.held_files.clear()


def report_hardware(context: RunContext, *, workers: int) -> None:
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


@contextmanager
def warn_on_write_error(
    context: RunContext, name: str, consequence: str = "Training goes on without it."
) -> Iterator[None]:
    """What is written in the block is not worth a run."""
    try:
        yield
    except OSError as error:
        warn(
            context.console, context.events, name, f"{name} cannot be written: {error.strerror or error}. {consequence}"
        )
