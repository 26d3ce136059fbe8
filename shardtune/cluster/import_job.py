"""What does a team have today: a command line, a script with one in it, or a manifest? Read with the right importer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from shardtune.cluster.import_command import local_script
from shardtune.cluster.import_manifest import import_manifest
from shardtune.cluster.import_report import Imported
from shardtune.cluster.import_runai import import_runai
from shardtune.errors import UserInputError


def import_job(what: Sequence[str], script: Path | None = None, *, keep_uid: bool = False) -> Imported:
    """The section `cluster` for `what`: the words of a command of Run:ai, or one file.

    Args:
        script: The launcher script that the job's command runs, where it has another name here.

    Raises:
        UserInputError: the file cannot be read, or this is no job.
    """
    if script is not None and not script.is_file():
        raise UserInputError(f"The script '{script}' does not exist.", fix="Check --script.")
    read_script = local_script(script)
    if len(what) > 1 or not (what and ("/" in what[0] or "." in what[0])):
        return import_runai(what, read_script, keep_uid=keep_uid)
    file = Path(what[0])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(
            f"'{file}' cannot be read.",
            why=str(error),
            fix="Name a YAML file, or write `shardtune cluster import -- runai training pytorch submit …`.",
        ) from error
    if words := _command_in(text):
        return import_runai(words, read_script, keep_uid=keep_uid)
    return import_manifest(text, str(file), read_script, keep_uid=keep_uid)


def _command_in(text: str) -> list[str] | None:
    """The command of Run:ai in a shell script."""
    joined = re.sub(r"\\\n", " ", text)
    line = re.search(r"^[ \t]*(?:exec +)?(\S*\brunai(?:-[\d.]+)? .*\bsubmit.*)$", joined, flags=re.MULTILINE)
    if line is None:
        return None
    try:
        return shlex.split(line[1], comments=True)
    except ValueError as error:
        raise UserInputError(
            "The command of Run:ai in this file cannot be read as shell.", why=f"{error}.", fix="Check its quotes."
        ) from error
