"""What came out, and where does it stay? One JSON object, a table for people, answers row by row. No torch here."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtune import __version__
from shardtune.durable import read_plain, replace_file
from shardtune.errors import UserInputError
from shardtune.evaluation.metrics import Metric
from shardtune.evaluation.tasks import TaskScore

SCHEMA = 1
FOLDER = "evaluations"
MOST_ROWS = 1000  # saved one by one
_MOST_TEXT = 20_000  # characters of a text that is saved


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    about: Model, adapter, data and generation, as `docs/evaluate.md` lists them.
    left_out: Metrics that were not measured, with the reason.
    rows: What happened row by row, in order.
    """

    about: dict[str, Any]
    metrics: tuple[Metric, ...]
    tasks: tuple[TaskScore, ...]
    left_out: dict[str, str]
    notes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    began: float = field(default_factory=time.time)
    token: str = field(default_factory=lambda: secrets.token_hex(2))

    @property
    def name(self) -> str:
        """From data (or tasks), checkpoint and time: a file name, which no other evaluation of that second has."""
        data = self.about["data"]
        if data is not None:
            label = "own" if data["own_validation"] else Path(str(data["path"])).name.partition(".")[0]
            what = f"{label}-{data['split']}" if data["split"] is not None else label
        else:
            what = "-".join(dict.fromkeys(task.task for task in self.tasks)) or "tasks"
        when = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.began))
        return f"{_slug(what)}-{_slug(self.about['checkpoint'])}-{when}-{self.token}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "time": round(self.began, 3),
            "shardtune": __version__,
            **self.about,
            "metrics": [metric.as_dict() for metric in self.metrics],
            "tasks": [task.as_dict() for task in self.tasks],
            "left_out": [{"metric": name, "why": why} for name, why in self.left_out.items()],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Destination:
    """Where a result will be kept; both can be written.

    Attributes:
        folder: Of the run's evaluations; None: of an adapter outside of any run, or a run that cannot be written.
        out: What `--out` names.
        notice: What that means, where no report will show the result.
    """

    folder: Path | None
    out: Path | None
    notice: str = ""

    @classmethod
    def check(cls, run: Path | None, out: Path | None) -> Destination:
        """Before the work.

        Raises:
            UserInputError: `out` cannot be written, or nothing can.
        """
        folder, notice = None, ""
        if run is not None:
            try:
                folder = evaluations_folder(run)
            except UserInputError as error:  # somebody else's run
                if out is None:
                    raise
                notice = f"{error.what} It is in --out alone, and in no report."
        elif out is None:
            notice = "Nothing is kept: the adapter is outside of any run, and there is no --out."
        if out is not None:
            out = out.expanduser()
            check_out(out)
        return cls(folder, out, notice)

    def write(self, evaluation: Evaluation) -> dict[Path, dict[str, Any]]:
        """The files that have the result now, and what is in each: they name the file of their rows."""
        files = [self.folder / f"{evaluation.name}.json"] if self.folder is not None else []
        files += [self.out] if self.out is not None else []
        return {file: write(evaluation, file) for file in files}


def evaluations_folder(run: Path) -> Path:
    """The folder of a run's evaluations, made if need be.

    Raises:
        UserInputError: it cannot be written, or is a link to somewhere else.
    """
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise UserInputError(
                f"'{folder}' is a symbolic link.",
                why="Files would be written wherever it points.",
                fix="Remove the link, or replace it with a folder.",
            )
        _check_writable(folder)
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


def check_out(file: Path) -> None:
    """Raise now rather than after the work if `file` cannot be written, or it or its rows would replace another's."""
    folder = file.absolute().parent
    try:
        if file.is_dir():
            raise UserInputError(f"--out: '{file}' is a folder.", fix="Give a file, such as results.json.")
        _check_writable(folder)
        taken = [path for path in (file, rows_file(file)) if os.path.lexists(path)]
        if taken and not _is_result(file):
            raise UserInputError(
                f"--out: '{taken[0]}' is there already, and is no result of shardtune eval.",
                why=f"The result would replace {'it' if taken[0] == file else 'it with its rows'}.",
                fix="Give another name.",
            )
    except OSError as error:
        raise _not_writable(folder, error) from error


def _is_result(file: Path) -> bool:
    try:
        found = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"schema", "shardtune", "sides"} <= found.keys()


def rows_file(file: Path) -> Path:
    """Beside a result, what happened row by row."""
    return file.with_name(f"{file.name.removesuffix('.json')}.rows.jsonl")


def write(evaluation: Evaluation, file: Path) -> dict[str, Any]:
    """Write the result, and its rows beside it (`NAME.rows.jsonl`), which come first: a result names whole rows.

    Returns what is in `file`.

    Raises:
        UserInputError: the disk refuses.
    """
    result = evaluation.as_dict()
    rows = saved_rows(evaluation.rows)
    try:
        if rows:
            beside = rows_file(file)
            replace_file(beside, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            result["rows_file"] = {"name": beside.name, "rows": len(rows), "of": len(evaluation.rows)}
        replace_file(file, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise _not_writable(file.parent, error) from error
    return result


def saved_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows; of too many those that the tuned model answers wrongly, then those it finds least likely, in order."""
    kept = sorted(rows, key=_worst_first)[:MOST_ROWS]
    return [{name: _cut(value) for name, value in row.items()} for row in sorted(kept, key=lambda row: int(row["row"]))]


def _worst_first(row: dict[str, Any]) -> tuple[bool, float]:
    exact = (row.get("exact_match") or {}).get("tuned")
    return exact is not False, -float((row.get("loss") or {}).get("tuned") or 0.0)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[:_MOST_TEXT]} … ({len(value) - _MOST_TEXT:,} more characters)"
    return value


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:60] or "data"


def _check_writable(folder: Path) -> None:
    probe = folder / ".shardtune-writable"
    probe.touch()
    probe.unlink()


def _not_writable(folder: Path, error: OSError) -> UserInputError:
    if isinstance(error, FileNotFoundError):
        return UserInputError(f"There is no folder '{folder}' for the result.", fix="Create it, or name another --out.")
    return UserInputError(
        f"The result cannot be written to '{folder}'.",
        why=error.strerror or str(error),
        fix="Make the folder writable and free space on its disk, or write elsewhere: --out FILE.",
    )
