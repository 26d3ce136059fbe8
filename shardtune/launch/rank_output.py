"""Where does what a rank prints go? Into its log, and rank by rank onto the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

LOGS = "logs"
_PIECE = 1 << 16
_LAST_OUTPUT = 2.0  # seconds for what was printed last; a process the script left behind may hold the pipe open


def log_path(folder: Path, rank: int) -> Path:
    """In the run's folder."""
    return folder / LOGS / f"rank-{rank}.log"


class RankOutput:
    """Copies stdout and stderr of each rank to `<run>/logs/rank-N.log`, and of those that are shown to this terminal.

    Args:
        show_all: Every rank of this node, each line with its rank; otherwise the first one, as it is.
    """

    def __init__(self, folder: Path, *, show_all: bool) -> None:
        self.folder, self.show_all = folder, show_all
        self._threads: list[threading.Thread] = []
        self._terminal = threading.Lock()  # one line at a time
        (folder / LOGS).mkdir(exist_ok=True)

    def follow(self, processes: Iterable[tuple[int, subprocess.Popen[bytes]]]) -> None:
        """Args:
        processes: By rank, started with pipes; the first one is shown.
        """
        for index, (rank, process) in enumerate(processes):
            log = _Log(log_path(self.folder, rank))
            for pipe, terminal in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert pipe is not None
                shown = _fileno(terminal) if self.show_all or index == 0 else None
                prefix = f"[rank {rank}] ".encode() if self.show_all else b""
                thread = threading.Thread(target=self._copy, args=(pipe, log, shown, prefix), daemon=True)
                thread.start()
                self._threads.append(thread)

    def finish(self) -> None:
        """Wait until everything is copied; the ranks have ended."""
        deadline = time.monotonic() + _LAST_OUTPUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []

    def _copy(self, pipe: FileIO, log: _Log, shown: int | None, prefix: bytes) -> None:
        begun = unlogged = b""  # a line whose end has not come yet
        while piece := os.read(pipe.fileno(), _PIECE):
            unlogged += piece  # whole lines: Python writes the words of a print one by one, and there are two pipes
            end = max(unlogged.rfind(b"\n"), unlogged.rfind(b"\r")) + 1
            end = end or (len(unlogged) if len(unlogged) > _PIECE else 0)
            log.write(unlogged[:end])
            unlogged = unlogged[end:]
            if shown is None:
                continue
            if prefix:
                *lines, begun = (begun + piece).split(b"\n")
                piece = b"".join(prefix + line + b"\n" for line in lines)
            self._show(shown, piece)
        log.write(unlogged)
        if begun and shown is not None:
            self._show(shown, prefix + begun + b"\n")
        pipe.close()

    def _show(self, terminal: int, piece: bytes) -> None:
        with self._terminal:
            rest = memoryview(piece)
            while rest:
                try:
                    rest = rest[os.write(terminal, rest) :]
                except OSError:  # nobody reads it any more, or its disk is full: the log has it
                    return


class _Log:
    """A rank's log: appended to, as a run may be started several times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # stdout and stderr
        self._file: FileIO | None = None
        try:
            self._file = FileIO(path, "a")
        except OSError as error:
            self._tell(error)
        if self._file is not None and self._file.tell():
            self.write(f"--- started again, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())

    def write(self, piece: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(piece)
            except OSError as error:
                self._file = None
                self._tell(error)

    def _tell(self, error: OSError) -> None:
        print(f"warning: {self.path} cannot be written: {error.strerror}; the run continues.", file=sys.stderr)


def _fileno(stream: object) -> int | None:
    """Of the terminal, or of the file it was redirected to; None where it is closed."""
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
