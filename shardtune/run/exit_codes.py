"""What does an exit code say to whoever started the run? docs/exit-codes.md is the same list in words."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
WRONG_INPUT = 2
LOST = 69  # a node or its network is gone (EX_UNAVAILABLE)
OUT_OF_MEMORY = 71  # of a GPU: the same config would end the same way (EX_OSERR)
PREEMPTED = 75  # stopped by SIGTERM or SIGUSR1 with a checkpoint: start me again (EX_TEMPFAIL)
NO_PROGRESS = 76  # a rank hung, and the deadline ended the run (EX_PROTOCOL)
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM  # a second signal came before the save was done; older checkpoints are good

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """What asks a run to stop: Ctrl-C, a scheduler, a terminal that is closed (unless nohup has it ignored)."""
    return [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def stopped_by(number: int) -> int:
    """The code of a run that ended in good order because of this signal."""
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def stop_signal(code: int) -> signal.Signals | None:
    """The signal a worker's exit code speaks of: it stopped in good order, or died of it before it listened."""
    if code in (INTERRUPTED, -signal.SIGINT):
        return signal.SIGINT
    if code in (PREEMPTED, TERMINATED, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGHUP):
        return signal.SIGTERM
    return None
