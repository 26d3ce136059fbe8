"""`python -m shardtune`, which is also what torchrun and accelerate start."""

import os
import signal
import sys

from shardtune.run.channel import LAUNCHER_VARIABLE, end_with_launcher

if __name__ == "__main__":
    if LAUNCHER_VARIABLE in os.environ:  # until it handles Ctrl-C, a rank dies of it without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["train"]:  # a rank; what a rank starts itself has another parent
        end_with_launcher()
    from shardtune.cli.main import main  # after it: the first import that takes long

    main()
