"""`shardtune report RUN …`: an HTML report of a run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.options import RunsDir, complete_run


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Id or folder of a run; several are compared.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Default: report.html in the run's folder, or comparison.html here."
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Write a self-contained HTML report of a run: charts, config, checkpoints, samples.

    Exit codes: 0 written; 2 no such run, or the file cannot be written.
    """
    import time

    from shardtune.report.compare import compare_view
    from shardtune.report.formatting import memory
    from shardtune.report.history import RunHistory
    from shardtune.report.page import write_page
    from shardtune.report.runs import find_run
    from shardtune.report.view import run_view

    histories = [RunHistory(folder) for folder in dict.fromkeys(find_run(run, runs_dir) for run in runs)]
    for history in histories:
        history.update()
    if len(histories) == 1:
        view, path = run_view(histories[0], time.time()), output or histories[0].folder / "report.html"
    else:
        view, path = compare_view(histories, time.time()), output or Path("comparison.html")
    size = write_page(view, path)
    print(f"{path} ({memory(size)})")
