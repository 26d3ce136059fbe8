"""What if stdout goes to a file on a full disk? The output is dropped; the run continues."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class TolerantStream:
    """A text stream whose `write` and `flush` ignore OSErrors. Everything else is delegated to the stream."""

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
def ignore_write_errors() -> Iterator[None]:
    """For stdout and stderr, in the block; and until the process ends if output is still unwritten then, because
    Python exits with 120 when the last flush fails."""
    former = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {name: TolerantStream(stream) for name, stream in former.items()}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.flush()
            if not stream.failed and getattr(sys, name) is stream:
                setattr(sys, name, former[name])
