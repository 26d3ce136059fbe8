"""Where does a process hang that does not answer? Asked by signal, faulthandler answers without Python's lock.

faulthandler reads the frames of *other* threads while they run, and one time in ten or twenty that ends the process
in the middle of the answer. So there are two questions, each with a signal and a file of the rank's channel: the main
thread for its own frames, which is always safe, and then, for what it adds, all threads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardtune.run.channel import Channel

_MAIN, _ALL = signal.SIGUSR2, signal.SIGVTALRM
_QUIET = 0.5  # seconds without another byte after which an answer is complete
# Seconds for each answer, also on a busy machine. Together with what the other ranks have to end in, less than a master
# waits for a node that collects its findings.
_MAIN_SECONDS, _ALL_SECONDS = 5.0, 2.5
_READY = b"ready\n"  # before the first answer: without a handler the signals would end the process


@contextmanager
def stack_dump_handlers(channel: Channel) -> Iterator[None]:
    """In the rank: answer the launcher's questions from now on."""
    faulthandler.register(_MAIN, file=channel.main_stack, all_threads=False)
    faulthandler.register(_ALL, file=channel.all_stacks, all_threads=True)
    os.write(channel.main_stack, _READY)
    try:
        yield
    finally:
        faulthandler.unregister(_MAIN)
        faulthandler.unregister(_ALL)


def dump_stacks(pid: int, channel: Channel) -> str:
    """In the launcher: the stacks of a rank that is ended right after; a stopped one has to be woken for it.

    Empty where the rank has not begun to answer yet.
    """
    if os.fstat(channel.main_stack).st_size < len(_READY):
        return ""
    # To the main thread itself: a signal to a stopped process is taken by whichever of its threads wakes first.
    _signal_main_thread(pid, _MAIN)  # pending until it is woken, and handled before anything else
    os.kill(pid, signal.SIGCONT)
    of_main = _read_dump(channel.main_stack, len(_READY), _MAIN_SECONDS)
    if not of_main:
        return (
            f"It wrote no stacks within {_MAIN_SECONDS:.0f} s: its main thread does not leave the kernel, or the "
            "machine is overloaded.\n"
        )
    _signal_main_thread(pid, _ALL)
    all_threads = _read_dump(channel.all_stacks, 0, _ALL_SECONDS)
    return f"{of_main}\nAll threads (as far as they could be read while they ran):\n{all_threads}"


def _signal_main_thread(pid: int, number: signal.Signals) -> None:
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:  # not Linux
        os.kill(pid, number)
    else:
        tgkill(pid, pid, int(number))


def _read_dump(file: int, begin: int, seconds: float) -> str:
    """What was written after `begin` once nothing more has come for a while."""
    began = grown = time.monotonic()
    size = begin
    while (now := time.monotonic()) < began + seconds and not (size > begin and now > grown + _QUIET):
        if (written := os.fstat(file).st_size) != size:
            size, grown = written, now
        time.sleep(0.05)
    return os.pread(file, size - begin, begin).decode("utf-8", errors="replace")
