"""Where does this run write? A folder of its own under `output_dir`, checked before anything is started."""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime
from pathlib import Path

from shardtune.errors import UserInputError

FOLDER_VARIABLE = "SHARDTUNE_RUN_DIR"  # set by our launcher, so that all its workers write to one place
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def new_run_id() -> str:
    """Sorts by time, and two runs started in the same second differ."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_run_id(name: str) -> None:
    """Raise unless it is one plain folder name."""
    if not _NAME.fullmatch(name):
        raise UserInputError(
            f"--run-id '{name}' cannot be a folder name.", fix="Use letters, digits, dots, dashes and underscores."
        )


def create_run_folder(output_dir: str, run_id: str | None = None) -> Path:
    """Create `<output_dir>/<run_id>` and return it, absolute.

    Raises:
        UserInputError: the id is no folder name, the place is not writable, or the run exists and is not empty.
    """
    name = run_id or new_run_id()
    check_run_id(name)
    folder = Path(output_dir).expanduser().absolute() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserInputError(
                f"The run '{name}' exists already: {folder}",
                why="Its folder is not empty, and a run never writes over another.",
                fix="Choose another --run-id, leave it out to get a new one, or delete that folder.",
            )
        probe = folder / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserInputError(
            f"The run's folder '{folder}' cannot be written.",
            why=f"{error.strerror} (as user {os.geteuid()}).",
            fix="Set train.output_dir to a folder you may write to.",
        ) from error
    return folder
