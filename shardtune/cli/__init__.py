"""The command line only: one file per command, no logic; commands that need no torch do not import it."""
