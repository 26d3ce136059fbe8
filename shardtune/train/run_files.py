"""What if a file of the run cannot be written? It costs that file and a warning, never the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardtune.durable import replace_file
from shardtune.terminal import warn

if TYPE_CHECKING:
    from shardtune.train.context import RunContext


def write_run_file(context: RunContext, name: str, text: str) -> None:
    """Give a file of the run's folder this content; where there is no room for it, it keeps the one it has.

    As events, it waits where a run that has trained may yet refuse to go on with this start.
    """
    if context.events.held:
        context.held_files[name] = text
        return
    with expendable(context, name):
        replace_file(context.folder / name, text)


def release_run_files(context: RunContext) -> None:
    """The run goes on: write what was held back, events and files."""
    context.events.release()
    for name, text in context.held_files.items():
        write_run_file(context, name, text)
    context.held_files.clear()


@contextmanager
def expendable(context: RunContext, name: str, consequence: str = "Training goes on without it.") -> Iterator[None]:
    """What is written in the block is not worth a run."""
    try:
        yield
    except OSError as error:
        warn(
            context.console, context.events, name, f"{name} cannot be written: {error.strerror or error}. {consequence}"
        )
