"""`python -m shardtune`, which is also what torchrun and accelerate start."""

import sys

from shardtune.run.channel import end_with_launcher

if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # a rank; what a rank starts itself has another parent
        end_with_launcher()
    from shardtune.cli.main import main  # after it: the first import that takes long

    main()
