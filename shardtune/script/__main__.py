"""`python -m shardtune.script [-m] TARGET ARGS`: one rank of `shardtune run`; its launcher starts it."""

import signal
import sys

from shardtune.run.channel import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # forwarded by the launcher: without a traceback from every rank
    from shardtune.script.rank import run_rank

    run_rank(sys.argv[1:])
