"""`shardtune dashboard`: live reports of all runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUNS_DIR",
            help="Folder of runs (train.output_dir); default: runs, or the only folder here that contains runs.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; any but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 picks a free port.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="SHARDTUNE_DASHBOARD_TOKEN",
            metavar="TEXT",
            help="Access token; generated and printed if needed and not given.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a page that lists all runs and shows each of them live. It is read-only; Ctrl-C stops it.

    Exit codes: 0 stopped by Ctrl-C; 2 no such folder, or the address cannot be used.
    """
    from shardtune.errors import UserInputError
    from shardtune.report.server import listen, serve

    runs_dir = runs_dir or default_folder()
    if not runs_dir.is_dir():
        raise UserInputError(
            f"There is no folder '{runs_dir}'.", fix="Give the folder that contains the runs (train.output_dir)."
        )
    address = listen(host, port, token)

    def ready() -> None:
        print(f"Dashboard of {runs_dir.resolve()}: {address.url}\nPress Ctrl-C to stop.", flush=True)

    serve(runs_dir.resolve(), address, ready)
    print("Dashboard stopped.")


def default_folder() -> Path:
    """`runs`, or if there is none, the only folder here that contains runs."""
    from shardtune.errors import UserInputError
    from shardtune.report.runs import runs_dirs

    usual, *others = runs_dirs()
    if usual.is_dir() or not others:
        return usual
    if len(others) > 1:
        raise UserInputError(
            f"There is no folder '{usual}', and several others here contain runs: {', '.join(map(str, others))}.",
            fix=f"Give one of them: shardtune dashboard {others[0]}",
        )
    return others[0]
