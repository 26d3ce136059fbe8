"""What does an exit code mean to whoever started the run? docs/exit-codes.md describes the same list."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
WRONG_INPUT = 2
LOST = 69  # a node or its network is gone (EX_UNAVAILABLE)
OUT_OF_MEMORY = 71  # of a GPU: the same config would end the same way (EX_OSERR)
PREEMPTED = 75  # stopped by SIGTERM or SIGUSR1 with a checkpoint: restart the same command (EX_TEMPFAIL)
NO_PROGRESS = 76  # a rank hung, and the deadline ended the run (EX_PROTOCOL)
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM  # a second signal came before the save was done; older checkpoints are intact

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a run to stop: Ctrl-C, a scheduler, a closed terminal (unless nohup ignores it)."""
    return [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def stopped_by(number: int) -> int:
    """The code of a run that stopped cleanly because of this signal."""
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def stop_signal(code: int) -> signal.Signals | None:
    """The signal that a worker's exit code stands for: it stopped cleanly, or died of it before it had a handler."""
    if code in (INTERRUPTED, -signal.SIGINT):
        return signal.SIGINT
    if code in (PREEMPTED, TERMINATED, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGHUP):
        return signal.SIGTERM
    return None
