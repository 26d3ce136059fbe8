"""What is wrong with a config, and where? Places, problems, and one report of them all."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardtune.errors import UserInputError

# Beyond this the first ones scroll off the screen, and they are the ones to fix first.
MOST_LISTED = 15
MOST_LINES = 36
WIDTH = 80


@dataclass(frozen=True)
class Place:
    """Where something was set: a line of a file, an override on the command line, or a key of accelerate's file.

    Example:
        >>> str(Place("run.yaml", 3, 5))
        'run.yaml:3:5'
        >>> str(Place("-o train.seed=1", kind="override"))
        '-o train.seed=1'
    """

    source: str
    line: int = 0
    column: int = 0
    kind: Literal["file", "override", "accelerate"] = "file"
    written: str = ""  # how the config names the source, where that is with a ${VAR}

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def as_written(self) -> str:
        """The place as it may be saved: without the values of variables."""
        return str(replace(self, source=self.written or self.source))


@dataclass(frozen=True)
class Problem:
    """One thing to correct: where it stands, the key's dotted path ("" for a whole file), what is wrong, what to do."""

    place: Place
    key: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.place}  {self.key}".rstrip()
        joint = ". " if self.fix[:1].isupper() else "; "
        text = f"{self.what.rstrip('.')}{joint}{self.fix}" if self.fix else self.what
        body = textwrap.fill(
            text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        return f"{head}\n{body}"


class ConfigError(UserInputError):
    """The configuration cannot be used. Holds every problem found, not only the first.

    Args:
        problems: All of them; they are listed in the order of the file, overrides last.
        subject: What was read, for the headline ("run.yaml").
        whole: List all of them, not one screen.
    """

    def __init__(self, problems: Sequence[Problem], subject: str, *, whole: bool = False) -> None:
        self.problems, self.subject = sorted(problems, key=_reading_order), subject
        count, texts = len(self.problems), [str(problem) for problem in self.problems]
        listed = texts if whole else _one_screen(texts)
        head = f"{subject}: {count} problem{'s' if count != 1 else ''} found, nothing was started."
        more = f"… and {count - len(listed)} more; `shardtune config validate` lists all."
        rest = [more] if count > len(listed) else []
        # One text, not what/why/fix: each problem brings its own three parts.
        super().__init__("\n".join([head, *listed, *rest]))


def _one_screen(texts: list[str]) -> list[str]:
    lines = 0
    for index, text in enumerate(texts[:MOST_LISTED]):
        lines += text.count("\n") + 1
        if lines > MOST_LINES:
            return texts[: max(index, 1)]
    return texts[:MOST_LISTED]


def _reading_order(problem: Problem) -> tuple[bool, str, int, int]:
    place = problem.place
    return place.kind == "override", place.source if place.kind != "override" else "", place.line, place.column


def shown(value: Any) -> str:
    """A wrong value as YAML would write it, cut to what fits on a line."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
