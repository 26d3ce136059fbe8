"""What if the log that a run is printed to lies on a full disk? Words are dropped; the run goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class UnstoppableStream:
    """A text stream whose `write` and `flush` do not fail for the disk's sake. Everything else is the stream's own."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self.failed = True
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
            self.failed = False
        except OSError:
            self.failed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unstoppable_output() -> Iterator[None]:
    """For standard output and error, in the block; and to the process's end where words are still unwritten then,
    because Python exits with 120 when it cannot flush its last ones."""
    former = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {name: UnstoppableStream(stream) for name, stream in former.items()}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.flush()
            if not stream.failed and getattr(sys, name) is stream:
                setattr(sys, name, former[name])
