"""What if a file of the run cannot be written? It costs that file and a warning, never the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardtune.durable import replace_file
from shardtune.observe.summary import warn

if TYPE_CHECKING:
    from shardtune.train.scene import Scene


def write_run_file(scene: Scene, name: str, text: str) -> None:
    """Give a file of the run's folder this content; where there is no room for it, it keeps the one it has."""
    with expendable(scene, name):
        replace_file(scene.folder / name, text)


@contextmanager
def expendable(scene: Scene, name: str, consequence: str = "Training goes on without it.") -> Iterator[None]:
    """What is written in the block is not worth a run."""
    try:
        yield
    except OSError as error:
        warn(scene.console, scene.events, name, f"{name} cannot be written: {error.strerror or error}. {consequence}")
