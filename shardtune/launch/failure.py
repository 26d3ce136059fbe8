"""Who failed first, and what did it say? Workers leave their error in a file; the launcher prints one, once."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from shardtune.errors import ShardtuneError

ERRORS_VARIABLE = "SHARDTUNE_ERRORS_DIR"


def report_failure(error: BaseException, rank: int) -> int:
    """Tell the launcher (or, without one, the terminal) what happened; returns the exit code of this process.

    A ShardtuneError is told in its three parts; anything else is a bug or a broken machine and keeps its traceback.
    """
    known = isinstance(error, ShardtuneError)
    record = {
        "rank": rank,
        "time": time.time(),
        "text": render(error) if isinstance(error, ShardtuneError) else "".join(traceback.format_exception(error)),
        "known": known,
        "exit_code": error.exit_code if isinstance(error, ShardtuneError) else 1,
    }
    folder = os.environ.get(ERRORS_VARIABLE)
    if not (folder and _left_for_launcher(Path(folder), record)):
        print(record["text"] if known and rank == 0 else f"rank {rank}: {record['text']}", file=sys.stderr)
    return int(str(record["exit_code"]))


def _left_for_launcher(folder: Path, record: dict[str, object]) -> bool:
    target = folder / f"rank{record['rank']}.json"
    try:
        target.with_suffix(".tmp").write_text(json.dumps(record), encoding="utf-8")
        target.with_suffix(".tmp").rename(target)
    except OSError:  # the launcher is gone, or the disk is full, which may well be the failure to tell
        return False
    return True


def first_failure(folder: Path) -> tuple[str, int] | None:
    """Text and exit code of the error that came first; the others are mostly its echo."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    if not records:
        return None
    first = min(records, key=lambda record: (record["time"], record["rank"]))
    same = sum(record["text"] == first["text"] for record in records)
    where = "" if same == len(records) or first["known"] else f"rank {first['rank']} failed first:\n"
    return where + first["text"], int(first["exit_code"])


def render(error: ShardtuneError) -> str:
    """The three parts, each with its own word in front."""
    parts = [f"error: {error.what}"]
    parts += [f"  why: {error.why}"] if error.why else []
    parts += [f"  fix: {error.fix}"] if error.fix else []
    return "\n".join(parts)
