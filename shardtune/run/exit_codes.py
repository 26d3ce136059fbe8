"""What does an exit code mean to whoever started the run?"""

from __future__ import annotations

import signal
from dataclasses import dataclass

DONE = 0
FAILED = 1
WRONG_INPUT = 2
LOST = 69  # a node or its network is gone (EX_UNAVAILABLE)
OUT_OF_MEMORY = 71  # of a GPU: the same config would end the same way (EX_OSERR)
PREEMPTED = 75  # stopped by SIGTERM or SIGUSR1 with a checkpoint: restart the same command (EX_TEMPFAIL)
NO_PROGRESS = 76  # a rank hung, and the deadline ended the run (EX_PROTOCOL)
INTERRUPTED = 128 + signal.SIGINT
KILLED = 128 + signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM  # a second signal came before the save was done; older checkpoints are intact


@dataclass(frozen=True)
class ExitCode:
    """For docs/exit-codes.md and `shardtune explain`.

    Args:
        restart: Whether to run the same command again.
    """

    meaning: str
    restart: str


EXIT_CODES: dict[int, ExitCode] = {
    DONE: ExitCode("Done; `final/` is written.", "no"),
    FAILED: ExitCode(
        "A rank failed: a known error (a NaN loss, or replicas whose weights differ, for example), or a traceback.",
        "read the message first",
    ),
    WRONG_INPUT: ExitCode(
        "Invalid input: the config, a path, an option, nodes that do not match, a machine that is not fit for the run "
        "(docs/doctor.md; a broken GPU exits with 1). Nothing was trained, or a restart was refused (its data changed, "
        "its model is gone): then the run and its checkpoints are kept, and the message says where.",
        "after fixing it",
    ),
    LOST: ExitCode("A node, its network or the master was lost.", "yes"),
    OUT_OF_MEMORY: ExitCode(
        "A GPU ran out of memory; the message says what used it and what would free enough (docs/out-of-memory.md).",
        "after changing a setting",
    ),
    PREEMPTED: ExitCode(
        "Preempted: SIGTERM, SIGUSR1 or SIGHUP came, all ranks stopped at the same step and saved. Also when there was "
        "nothing to save yet.",
        "**yes**: requeue on this code",
    ),
    NO_PROGRESS: ExitCode(
        "No progress: a rank hung, and its deadline ended the run (docs/failures.md).", "yes; see `crash/`"
    ),
    INTERRUPTED: ExitCode(
        "Ctrl-C; saved like 75. Before the first step there is nothing to save, and a new run's folder is removed.",
        "as you like",
    ),
    KILLED: ExitCode(
        "A rank was killed by SIGKILL (usually because the host ran out of memory; where the cgroup counts OOM kills, "
        "the message says whether it was one). In general 128 + signal.",
        "after checking memory",
    ),
    TERMINATED: ExitCode(
        "A second SIGTERM came before the save was done: exited immediately. Older checkpoints are intact. Also a "
        "SIGTERM before the command has installed its handler, with nothing started.",
        "yes",
    ),
}

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
