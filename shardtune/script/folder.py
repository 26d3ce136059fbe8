"""Which folder does a script's run write to? A new one, or that of its name, if it is the same command."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from shardtune.durable import read_plain, replace_file
from shardtune.errors import UserInputError
from shardtune.run.exit_codes import DONE, WRONG_INPUT
from shardtune.run.folder import (
    CHECKPOINTS,
    LEASE,
    RECORD,
    SCRIPT,
    Access,
    RunFolder,
    check_run_id,
    create_run_folder,
    hold_run_folder,
    new_run_id,
)
from shardtune.script.command import ScriptCommand


def open_folder(output_dir: str, name: str | None, command: ScriptCommand, access: Access) -> tuple[RunFolder, bool]:
    """The run's folder, leased by this process, and whether it had begun before.

    Raises:
        UserInputError: the name is another run's, or its run has finished.
    """
    name = name or new_run_id()
    check_run_id(name, "--name")
    folder = Path(output_dir).expanduser().absolute() / name
    if not folder.is_dir() or all(entry.name == LEASE for entry in folder.iterdir()):
        return create_run_folder(output_dir, name, access), False
    record = _read_record(folder)
    if record.get("kind") != SCRIPT:
        raise UserInputError(
            f"The folder '{folder}' is not that of a script's run.",
            why="It holds something else, and a run never writes over that.",
            fix="Choose another --name.",
        )
    if record.get("identity") != command.identity and not _was_refused(record, folder):
        before = shlex.join(map(str, record.get("command", [])))
        raise UserInputError(
            f"The run '{name}' has another command.", why=f"It was started as: {before}",
            fix="Choose another --name, or give the same script and arguments.",
        )  # fmt: skip
    if record.get("finished"):
        raise UserInputError(
            f"The run '{name}' has finished: {folder}", fix="Choose another --name, or delete that folder."
        )
    return hold_run_folder(folder, access), True


def _was_refused(record: dict[str, Any], folder: Path) -> bool:
    """Its arguments were wrong, and it had nothing to lose: what is corrected may have its name."""
    return record.get("exit_code") == WRONG_INPUT and not (folder / CHECKPOINTS).exists()


def record_start(folder: Path, command: ScriptCommand) -> None:
    """So that the same name finds the same command again."""
    _write_record(folder, command, time.time(), finished=False)


def record_end(folder: Path, command: ScriptCommand, exit_code: int) -> None:
    """How it ended, also where no rank could say so; a script that was done is not started again."""
    started = float(_read_record(folder).get("started", time.time()))
    _write_record(folder, command, started, finished=exit_code == DONE, exit_code=exit_code, ended=time.time())


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_plain(folder / RECORD))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(folder: Path, command: ScriptCommand, started: float, *, finished: bool, **more: float) -> None:
    record = {
        "kind": SCRIPT, "command": command.words, "identity": command.identity, "settings": {}, "started": started,
        "finished": finished, **more,
    }  # fmt: skip
    replace_file(folder / RECORD, json.dumps(record, indent=1) + "\n")
