"""What if a file of the run cannot be written? It costs that file and a warning, never the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shardtune.durable import replace_file
from shardtune.terminal import warn

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from shardtune.train.context import RunContext

_TRACKERS = "transformers.integrations"


def write_run_file(context: RunContext, name: str, text: str) -> None:
    """Give a file of the run's folder this content; where there is no room for it, it keeps the one it has.

    As events, it waits where a run that has trained may yet refuse to go on with this start.
    """
    if context.events.deferred:
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


def let_trackers_fail(context: RunContext, callbacks: Iterable[TrainerCallback]) -> None:
    """A tracker (`train.report_to`) whose disk or service is gone gets nothing more; the run goes on without it."""
    for callback in callbacks:
        if type(callback).__module__.startswith(_TRACKERS):
            failed: list[OSError] = []
            for name in filter(lambda name: name.startswith("on_"), dir(callback)):
                setattr(callback, name, partial(_call_unless_failed, context, getattr(callback, name), failed))


def _call_unless_failed(
    context: RunContext, method: Callable[..., Any], failed: list[OSError], *args: Any, **more: Any
) -> Any:
    if failed:
        return None
    try:
        return method(*args, **more)
    except OSError as error:
        failed.append(error)
        tracker = type(method.__self__).__name__.removesuffix("Callback")  # type: ignore[attr-defined]
        text = f"{tracker} cannot be written: {error.strerror or error}. It gets nothing more from this run."
        warn(context.console, context.events, "report_to", text)
        return None
