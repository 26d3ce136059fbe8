"""Where does an unresponsive process hang? On a signal, faulthandler dumps its stacks without the GIL.

faulthandler reads the frames of *other* threads while they run, and one time in ten or twenty that crashes the process
in the middle of the dump. So there are two dumps, each with a signal and a file of the rank's channel: first the main
thread's own frames, which is always safe, and then all threads.
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
_QUIET = 0.5  # seconds without another byte after which a dump is complete
# Seconds for each dump, also on a busy machine. Together with the time the other ranks have to end, less than a master
# waits for a node that collects its findings.
_MAIN_SECONDS, _ALL_SECONDS = 5.0, 2.5
_READY = b"ready\n"  # before the first dump: without a handler the signals would end the process


@contextmanager
def stack_dump_handlers(channel: Channel) -> Iterator[None]:
    """In the rank: dump stacks when the launcher asks for them."""
    faulthandler.register(_MAIN, file=channel.main_stack, all_threads=False)
    faulthandler.register(_ALL, file=channel.all_stacks, all_threads=True)
    os.write(channel.main_stack, _READY)
    try:
        yield
    finally:
        faulthandler.unregister(_MAIN)
        faulthandler.unregister(_ALL)


def dump_stacks(pid: int, channel: Channel) -> str:
    """In the launcher: the stacks of a rank that is killed right after; a stopped one is continued for it.

    Empty where the rank has not installed its handlers yet.
    """
    if os.fstat(channel.main_stack).st_size < len(_READY):
        return ""
    # To the main thread itself: a signal to a stopped process is handled by whichever of its threads wakes first.
    _signal_main_thread(pid, _MAIN)  # pending until it is continued, and handled before anything else
    os.kill(pid, signal.SIGCONT)
    of_main = _read_dump(channel.main_stack, len(_READY), _MAIN_SECONDS)
    if not of_main:
        return (
            f"No stacks within {_MAIN_SECONDS:.0f} s: its main thread is blocked in the kernel, or the machine is "
            "overloaded.\n"
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
    """What was written after `begin`, once nothing has been added for a while."""
    began = grown = time.monotonic()
    size = begin
    while (now := time.monotonic()) < began + seconds and not (size > begin and now > grown + _QUIET):
        if (written := os.fstat(file).st_size) != size:
            size, grown = written, now
        time.sleep(0.05)
    return os.pread(file, size - begin, begin).decode("utf-8", errors="replace")
