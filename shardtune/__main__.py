"""`python -m shardtune`, which is also what torchrun and accelerate start."""

from shardtune.launch.parent_death import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()
    from shardtune.cli.main import main  # after it: the first import that takes long

    main()
