"""`shardtune checkpoints RUN …`: lists the checkpoints of a run, and whether they are intact."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardtune.cli.options import RunsDir, complete_run

if TYPE_CHECKING:
    from shardtune.checkpoint.store import CheckpointStore


def checkpoints(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Id or folder of a run.", show_default=False, autocompletion=complete_run),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare checksums of all contents, not only names and sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """List the checkpoints of RUN: step, size, validation loss, age, damage, and which is the latest and the best.

    With several runs, one table each (--json: all in one list).

    Exit codes: 0 all intact; 1 one is damaged; 2 no such run.
    """
    found = []
    for store in [_store(run, runs_dir) for run in runs]:
        rows = [_row(store, step, verify) for step in store.steps()]
        found += rows
        if not as_json:
            _show(rows, verify, store, with_title=len(runs) > 1)
        for path in store.not_folders():
            print(f"{path} is a link or a file, not a checkpoint folder: ignored.", file=sys.stderr)
    if as_json:
        print(json.dumps(found, indent=1))
    sys.exit(1 if any(not row["intact"] for row in found) else 0)


def _store(run: str, runs_dir: Path | None) -> CheckpointStore:
    """The checkpoints of a run, by its id or folder; a folder of checkpoints is accepted, too."""
    from shardtune.checkpoint.store import CheckpointStore
    from shardtune.report.runs import find_run

    with contextlib.suppress(OSError):  # a name that is too long; `find_run` says that there is no such run
        for folder in (Path(run) / "checkpoints", Path(run)):
            store = CheckpointStore(folder, keep=None)
            if folder.is_dir() and (store.steps() or store.not_folders()):
                return store
    return CheckpointStore(find_run(run, runs_dir) / "checkpoints", keep=None)


def _row(store: CheckpointStore, step: int, verify: bool) -> dict[str, Any]:
    damages = store.verify(step, contents=verify)
    manifest, best = store.manifest(step), store.best()
    marks = [
        name
        for name, is_it in (("latest", step == store.steps()[-1]), ("best", best is not None and step == best[0]))
        if is_it
    ]
    return {
        "step": step,
        "path": str(store.path(step)),
        "bytes": manifest.size if manifest else None,
        "eval_loss": manifest.eval_loss if manifest else None,
        "time": manifest.about.get("time") if manifest else None,
        "processes": manifest.about.get("world_size") if manifest else None,
        "marks": marks,
        "intact": not any(damage.is_fatal for damage in damages),
        "damages": [str(damage) for damage in damages],
    }


def _no_checkpoints(run: Path) -> str:
    """Whether there will be any, and which setting says so."""
    from shardtune.checkpoint.final import FINAL, has_weights
    from shardtune.report.settings import bare_settings

    settings = bare_settings(run)
    strategy, steps = settings.get("train.save_strategy"), settings.get("train.save_steps")
    set_to = f"train.save_strategy: {strategy}" + (f", train.save_steps: {steps}" if strategy == "steps" else "")
    if has_weights(run / FINAL):
        because = f" ({set_to})" if strategy else ""
        return f"This run saved no checkpoints{because}; its result is {run / FINAL}."
    if strategy == "no":
        return f"This run saves no checkpoints ({set_to}); its result will be {run / FINAL}."
    return "No checkpoints yet."


def _show(rows: list[dict[str, Any]], verify: bool, store: CheckpointStore, *, with_title: bool) -> None:
    if with_title:
        print(store.folder)
    if not rows:
        print(_no_checkpoints(store.folder.parent))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from shardtune.terminal import size

    table = Table("step", "size", "eval loss", "age", "", "contents verified" if verify else "names and sizes verified")
    for row in rows:
        loss, written = row["eval_loss"], row["time"]
        state = "; ".join(row["damages"]) or "intact"
        table.add_row(
            str(row["step"]),
            size(row["bytes"]) if row["bytes"] is not None else "",
            f"{loss:.4f}" if loss is not None else "",
            _age(time.time() - written) if isinstance(written, int | float) else "",
            ", ".join(row["marks"]),
            escape(state) if row["intact"] else f"[bold red]{escape(state)}[/]",
        )
    Console().print(table)
    best = store.best()
    if best is not None and (choice := store.choice()) is not None and choice.step == best[0]:
        from shardtune.report.tables import why_best

        print(why_best(store, *best))


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
