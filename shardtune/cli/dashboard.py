"""`shardtune dashboard`: the same pages as a report, live, of all runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs_dir: Annotated[
        Path, typer.Argument(metavar="[RUNS_DIR]", help="Folder with runs (train.output_dir).", show_default="runs")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Anything but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="SHARDTUNE_DASHBOARD_TOKEN",
            metavar="TEXT",
            help="What a browser has to know; made and printed if needed and not given.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a page that lists all runs and shows each as it trains. It changes nothing; Ctrl-C ends it.

    Exit codes: 0 ended by Ctrl-C; 2 no such folder, or the address cannot be used.
    """
    from shardtune.errors import UserInputError
    from shardtune.report.server import listen, serve

    if not runs_dir.is_dir():
        raise UserInputError(
            f"There is no folder '{runs_dir}'.", fix="Give the folder that holds the runs (train.output_dir)."
        )
    address = listen(host, port, token)

    def ready() -> None:
        print(f"Dashboard of {runs_dir.resolve()}: {address.url}\nCtrl-C ends it.", flush=True)

    serve(runs_dir.resolve(), address, ready)
    print("Dashboard ended.")
