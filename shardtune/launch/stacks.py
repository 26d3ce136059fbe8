"""Where does a process hang that does not answer? Asked by signal, faulthandler answers without Python's lock.

faulthandler reads the frames of *other* threads while they run, and one time in ten or twenty that ends the process
in the middle of the answer. So there are two questions, each with a signal and a file: the main thread for its own
frames, which is always safe, and then, for what it adds, all threads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAIN, _ALL = signal.SIGUSR2, signal.SIGVTALRM
_QUIET = 0.5  # seconds without another byte after which an answer is complete
_PATIENCE = 3.0  # seconds for one answer


@contextmanager
def answering(folder: Path, rank: int) -> Iterator[None]:
    """In the rank: answer the launcher's questions from now on."""
    main, threads = _files(folder, rank)
    with main.open("w", encoding="utf-8") as main_file, threads.open("w", encoding="utf-8") as threads_file:
        faulthandler.register(_MAIN, file=main_file, all_threads=False)
        faulthandler.register(_ALL, file=threads_file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(_MAIN)
            faulthandler.unregister(_ALL)


def ask(pid: int, folder: Path, rank: int) -> str:
    """In the launcher: the stacks of a rank that is ended right after; a stopped one has to be woken for it.

    Empty where the rank has not begun to answer yet.
    """
    main, threads = _files(folder, rank)
    if not main.exists() or not threads.exists():
        return ""
    # To the main thread itself: a signal to a stopped process is taken by whichever of its threads wakes first.
    _signal_main_thread(pid, _MAIN)  # pending until it is woken, and handled before anything else
    os.kill(pid, signal.SIGCONT)
    of_main = _answer(main)
    if not of_main:
        return "It wrote no stacks when asked: its main thread does not leave the kernel.\n"
    _signal_main_thread(pid, _ALL)
    return f"{of_main}\nAll threads (as far as they could be read while they ran):\n{_answer(threads)}"


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"stack-rank{rank}.txt", folder / f"threads-rank{rank}.txt"


def _signal_main_thread(pid: int, number: signal.Signals) -> None:
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:  # not Linux
        os.kill(pid, number)
    else:
        tgkill(pid, pid, int(number))


def _answer(file: Path) -> str:
    """What was written once nothing more has come for a while."""
    began = grown = time.monotonic()
    size = 0
    while (now := time.monotonic()) < began + _PATIENCE and not (size and now > grown + _QUIET):
        if (written := file.stat().st_size) != size:
            size, grown = written, now
        time.sleep(0.05)
    return file.read_text(encoding="utf-8", errors="replace")
