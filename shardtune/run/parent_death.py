"""Does a rank outlive its launcher? Not on Linux: the kernel ends it, from before the first heavy import on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from shardtune.run.exit_codes import LOST

LAUNCHER_VARIABLE = "SHARDTUNE_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Ask the kernel to kill this rank when its launcher ends. Without our launcher, or without Linux, do nothing.

    The rank's watchdog looks for its launcher too, but it starts only after torch is imported, which can take minutes
    on a busy file system. Set by the rank itself rather than in a `preexec_fn`, which is unsafe beside threads.
    """
    if LAUNCHER_VARIABLE not in environ or sys.platform != "linux":
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        return  # a sandbox that forbids it: the watchdog remains
    if os.getppid() != int(environ[LAUNCHER_VARIABLE]):  # it ended before the kernel was asked
        os._exit(LOST)
