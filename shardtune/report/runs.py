"""Which runs are there, and what is their state? Read from the first and last lines of each, for thousands of runs."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.durable import open_plain
from shardtune.errors import UserInputError
from shardtune.report.failures import FOLDER, LATEST, Failure, current, read_failures
from shardtune.report.metrics import main_metric
from shardtune.report.read import Event, event_files, mapping, number, parse, read_json, text, whole
from shardtune.report.script import script_of
from shardtune.report.status import ENDINGS, Liveness, Status, status_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # as run/folder.py makes them; a test compares
_RECORD = "run.json"
DEFAULT_DIR = Path("runs")  # the default of train.output_dir
_MOST_RANKS = 64  # whose files are read
_HEAD, _TAIL = 256 << 10, 256 << 10  # bytes: the plan is near the start, a step and an evaluation near the end


@dataclass(frozen=True)
class RunSummary:
    """What the head and tail of a run's first event file contain.

    Args:
        metric: Name and last value of a script's main metric.
        model: Or the script.
    """

    started: float | None = None
    liveness: Liveness = Liveness()  # noqa: RUF009 - frozen
    steps: int | None = None
    step: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    processes: int | None = None
    metric: tuple[str, float] | None = None
    model: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class RunRow:
    name: str
    status: Status
    summary: RunSummary


@dataclass
class _Known:
    signature: tuple[object, ...]
    summary: RunSummary


@dataclass
class RunList:
    """The runs in a folder, and in the folders there that group runs.

    Caches each by the size and time of its files, so that an unchanged run costs a few `stat`s.
    """

    root: Path
    _known: dict[str, _Known] = field(default_factory=dict)

    def rows(self, now: float) -> list[RunRow]:
        """The newest first; a run that is deleted meanwhile is left out."""
        found = {}
        for name in _candidates(self.root):
            files = event_files(self.root / name)
            record = self.root / name / _RECORD
            first, others = next(iter(files.values()), None), list(files.values())[1:_MOST_RANKS]
            found_by_launcher = self.root / name / FOLDER / LATEST
            signature = tuple(_signature(path) for path in (record, first, found_by_launcher, *others))
            if not any(signature):
                continue
            known = self._known.get(name)
            if known is None or known.signature != signature:
                known = _Known(signature, summary(first, record, others))
            found[name] = known
        self._known = found
        rows = [
            RunRow(
                name,
                status_of(self.root / name, known.summary.liveness, now, known.summary.failure),
                known.summary,
            )
            for name, known in found.items()
        ]
        return sorted(rows, key=lambda row: (row.summary.started or 0.0, row.name), reverse=True)


def _candidates(root: Path) -> Iterator[str]:
    """Names of possible runs: folders there, and `group/folder` in those that are not runs."""
    for name, is_folder in _entries(root):
        if is_run(root / name):
            yield name
        elif is_folder:
            yield from (f"{name}/{inner}" for inner, _ in _entries(root / name))


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """(name, whether it is a folder and not a link) of what may be a run or contain runs."""
    try:
        with os.scandir(folder) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found if is_run_name(entry.name)]
    except OSError:
        return []


def is_run_name(name: str) -> bool:
    """One plain folder name, which cannot lead out of the folder of runs."""
    return _NAME.fullmatch(name) is not None


def is_run_path(name: str) -> bool:
    """The name of a run as a list has it: its folder, or `group/folder`."""
    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_run_name, parts))


def is_run(folder: Path) -> bool:
    try:
        return (folder / _RECORD).is_file() or bool(event_files(folder))
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def runs_dirs() -> list[Path]:
    """Where runs are looked up by default: `runs`, then the other folders here that contain runs."""
    others = sorted(name for name, is_folder in _entries(Path()) if is_folder and name != DEFAULT_DIR.name)
    return [DEFAULT_DIR, *(folder for folder in map(Path, others) if not is_run(folder) and _holds_runs(folder))]


def _holds_runs(folder: Path) -> bool:
    try:
        return next(folder.glob(f"*/{_RECORD}"), None) is not None
    except OSError:  # may not be entered, or its mount is gone
        return False


def find_run(given: str, runs_dir: Path | None) -> Path:
    """The folder of a run from its path, its id, or a unique prefix of its id.

    Args:
        runs_dir: Where ids are looked up; None: in `runs_dirs`.

    Raises:
        UserInputError: there is no such run, or several.
    """
    if runs_dir is not None and not runs_dir.is_dir() and not is_run(Path(given).expanduser()):
        raise UserInputError(
            f"--runs-dir '{runs_dir}' {'is not a folder' if runs_dir.exists() else 'does not exist'}.",
            fix="Give the folder that contains the run (train.output_dir of its config), or the run's own folder.",
        )
    given = given.rstrip("/") or given  # as a shell completes a folder
    searched = [runs_dir] if runs_dir is not None else runs_dirs()
    places = [Path(given).expanduser()]
    if is_run_path(given):
        places = [*(folder / given for folder in searched), *places]
    for place in places:
        if is_run(place):
            return place.resolve()
    found = {name: folder / name for folder in reversed(searched) for name in run_names(folder)}
    known = sorted(found, key=_id, reverse=True)
    grouped = [name for name in known if name.endswith(f"/{given}")]  # in folders, as the quickstart's runs are
    begin_so = grouped or [name for name in known if given and given in (name[: len(given)], _id(name)[: len(given)])]
    if len(begin_so) == 1:
        return found[begin_so[0]].resolve()
    if begin_so:
        raise UserInputError(
            f"{len(begin_so)} runs start with '{given}': {_some(begin_so)}.", fix="Give more of the id."
        )
    if inside := run_names(Path(given).expanduser()):
        raise UserInputError(
            f"'{given}' is a folder of runs, not a run. It contains {_some(inside)}.",
            fix=f"Give one of them, such as {Path(given) / inside[0]}.",
        )
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.6)
    there = f" Did you mean {' or '.join(near)}?" if near else f" Known runs: {_some(known)}." if known else ""
    raise UserInputError(
        f"There is no run '{given}'.{there}",
        why="Looked for run.json or events-rank0.jsonl in " + " and ".join(f"'{place}'" for place in places) + ".",
        fix="Give a run's folder, or its id with --runs-dir DIR (train.output_dir of its config).",
    )


def run_names(runs_dir: Path) -> list[str]:
    """Runs in a folder, newest first if their ids are dates."""
    return sorted((name for name in _candidates(runs_dir) if is_run(runs_dir / name)), key=_id, reverse=True)


def _id(name: str) -> str:
    return name.rpartition("/")[2]


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def summary(events: Path | None, record: Path, others: Sequence[Path] = ()) -> RunSummary:
    """Read the head and tail of a run's event file, and the model from its record.

    Args:
        others: Files of other ranks, which may contain a failure that the first rank did not record.
    """
    head, tail = _ends(events) if events is not None else ([], [])
    last, ending = _last_of_each(tail)
    start = next((event for event in head if event["event"] == "run_start"), {})
    plan = last.get("plan") or next((event for event in reversed(head) if event["event"] == "plan"), {})
    step, evaluated, profile, metrics = (last.get(kind, {}) for kind in ("step", "eval", "profile", "metrics"))
    run_record = read_json(record)
    times = [time for event in tail[-1:] if (time := number(event.get("time"))) is not None]
    steps = [found for event in (step, profile, evaluated, metrics) if (found := whole(event.get("step"))) is not None]
    script, logged = script_of(run_record), _last_metrics(tail)
    main = main_metric(logged)
    return RunSummary(
        started=number(start.get("time")) or number(run_record.get("started")),
        liveness=Liveness(
            recorded=number(run_record.get("started")),
            began=number(last.get("run_start", start).get("time")),
            last_step=max((time for event in (step, profile) if (time := number(event.get("time")))), default=None),
            last_time=times[0] if times else None,
            ending=ending or _ending_elsewhere(others, number(last.get("run_start", start).get("time"))),
            is_script=script is not None,
            exit_code=script.exit_code if script is not None else None,
        ),
        steps=whole(mapping(plan.get("math")).get("steps")),
        step=max(steps, default=None),
        loss=number(step.get("loss")) if step else logged.get("loss"),
        metric=(main, logged[main]) if main is not None else None,
        eval_loss=number(evaluated.get("loss")),
        tokens_per_second=number(step.get("tokens_per_second")),
        processes=whole(start.get("world_size")),
        model=text(mapping(mapping(run_record.get("settings")).get("model")).get("model_name_or_path"))
        or text(start.get("model"))
        or (script.name if script is not None else ""),
        failure=current(read_failures(record.parent), times[0] if times else None),
    )


def _last_of_each(events: list[Event]) -> tuple[dict[str, Event], Event | None]:
    last: dict[str, Event] = {}
    ending: Event | None = None
    for event in events:
        last[event["event"]] = event
        if event["event"] == "run_start":
            ending = None
        elif event["event"] in ENDINGS and (ending is None or ending["event"] == "run_end"):
            ending = event
    return last, ending


def _last_metrics(events: list[Event]) -> dict[str, float]:
    """The last value of each, in the order they were first logged."""
    found: dict[str, float] = {}
    for event in events:
        for name, given in mapping(event.get("values")).items() if event["event"] == "metrics" else ():
            if (value := number(given)) is not None:
                found[name] = value
    return found


def _ending_elsewhere(others: Sequence[Path], began: float | None) -> Event | None:
    for path in others:
        for event in reversed(_ends(path, 0, 16 << 10)[1]):
            time = number(event.get("time"))
            if event["event"] in ENDINGS and event["event"] != "run_end" and (time or 0.0) >= (began or 0.0):
                return event
    return None


def _ends(path: Path, head_bytes: int = _HEAD, tail_bytes: int = _TAIL) -> tuple[list[Event], list[Event]]:
    try:
        with open_plain(path) as file:
            head = file.read(head_bytes)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - tail_bytes))
            tail = file.read(tail_bytes)
    except OSError:
        return [], []
    first = [event for line in head.split(b"\n") if (event := parse(line)) is not None]
    # All of a small file; of a larger one from the first whole line on. An incomplete last line is ignored.
    lines = tail.split(b"\n")[0 if size <= tail_bytes else 1 :]
    return first, [event for line in lines[:-1] if (event := parse(line)) is not None]


def _signature(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_size, seen.st_mtime_ns, seen.st_ino
