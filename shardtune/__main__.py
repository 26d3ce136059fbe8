"""`shardtune`, and `python -m shardtune`, which is also what torchrun and accelerate start."""

import io
import os
import signal
import sys


def main() -> None:
    if os.getpid() == 1:
        _end_on_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that its encoding lacks must not end a run
            stream.reconfigure(errors="replace")
    try:
        from shardtune.run.channel import LAUNCHER_VARIABLE, end_with_launcher

        if LAUNCHER_VARIABLE in os.environ:  # until it handles Ctrl-C, a rank dies of it without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.argv[1:2] == ["train"]:  # a rank; what a rank starts itself has another parent
            end_with_launcher()
        from shardtune.cli.main import main as run  # after it: the first import that takes long

        run()
    except KeyboardInterrupt:  # Typer handles it in commands, but not while it reads their options
        sys.exit(130)


def _end_on_signals() -> None:
    """As the main process of a container, too: the kernel drops signals to process 1 for which it has no handler.

    A SIGTERM in the seconds of importing would be lost, and the pod would keep its GPUs until the grace period ends.
    """
    from shardtune.run.exit_codes import PREEMPTED

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # Python itself handles SIGINT
        signal.signal(number, lambda received, frame: os._exit(PREEMPTED))


if __name__ == "__main__":
    main()
