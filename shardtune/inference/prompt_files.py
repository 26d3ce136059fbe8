"""Which prompts does the command line give? Words, files, stdin. No torch here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtune.errors import UserInputError

STDIN = "-"
GivenPrompt = str | Mapping[str, Any]  # a text, or a row of data


def read_prompts(prompts: Sequence[str], file: str | None) -> list[GivenPrompt]:
    """All prompts, in order: those of the command line, then those of the file.

    Args:
        prompts: A text each; `-` is all of stdin as one prompt.
        file: One prompt per line; a .jsonl file has a row of data per line. `-` is stdin, one prompt per line.

    Raises:
        UserInputError: there is none, or the file cannot be read.
    """
    if (file == STDIN) + sum(prompt == STDIN for prompt in prompts) > 1:
        raise UserInputError("stdin is asked for twice.", fix="Give '-' once.")
    found: list[GivenPrompt] = [_stdin().rstrip("\n") if prompt == STDIN else prompt for prompt in prompts]
    if file is not None:
        found += stdin_lines() if file == STDIN else _file(Path(file).expanduser())
    if not found:
        raise UserInputError(
            "There is no prompt.",
            why="The prompt file is empty." if file is not None else "",
            fix='Give --prompt "…" (repeatable), --prompt-file FILE, or --prompt - to read it from stdin.',
        )
    for prompt in found:
        if isinstance(prompt, str) and not prompt.strip():
            raise UserInputError("A prompt is empty.", fix="Write something to answer.")
    return found


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserInputError("stdin is not UTF-8 text.", why=str(error)) from error


def stdin_lines() -> Iterator[str]:
    """Lines of stdin that are not blank, each as it comes."""
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserInputError("stdin is not UTF-8 text.", why=str(error)) from error


def _file(path: Path) -> list[GivenPrompt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(
            f"Cannot read the prompt file '{path}'.",
            why=getattr(error, "strerror", None) or str(error),
            fix="Give a text file with one prompt per line, or a .jsonl file with one row per line.",
        ) from error
    if path.suffix == ".jsonl":
        return list(_rows(text, path))
    return _lines(text)


def _lines(text: str) -> list[GivenPrompt]:
    # Not splitlines: a line separator of Unicode may stand in a prompt.
    return [line for line in (line.rstrip("\r") for line in text.split("\n")) if line.strip()]


def _rows(text: str, path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserInputError(f"{path}:{number} is not JSON.", why=str(error)) from error
        if not isinstance(row, dict):
            raise UserInputError(
                f"{path}:{number} is a {type(row).__name__}, not an object.",
                fix='Write rows such as {"prompt": "…"}, or those of the data.',
            )
        yield row
