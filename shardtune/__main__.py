"""`python -m shardtune`, which is also what torchrun and accelerate start."""

from shardtune.cli.main import main

if __name__ == "__main__":
    main()
