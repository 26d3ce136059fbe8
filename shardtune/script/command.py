"""Which script is meant? A Python file or a module with its arguments, as they stand behind `--`."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.errors import UserInputError

_USAGE = "Write it behind two dashes, after all options: -- script.py ARGS, or -- -m module ARGS."


@dataclass(frozen=True)
class ScriptCommand:
    """A file (`target` is its path) or a module (its name), and its arguments."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @classmethod
    def parse(cls, words: Sequence[str]) -> ScriptCommand:
        """Raises UserInputError if they name no script."""
        if not words:
            raise UserInputError("No script was given.", fix=_USAGE)
        if words[0] == "-m":
            if len(words) < 2:
                raise UserInputError("-m names no module.", fix=_USAGE)
            return cls(words[1], tuple(words[2:]), is_module=True)
        if Path(words[0]).name in ("python", "python3", "torchrun", "accelerate"):
            raise UserInputError(
                f"'{words[0]}' is not a script.",
                why="shardtune starts a Python process for each rank by itself.",
                fix="Name the script alone: -- train.py ARGS.",
            )
        if Path(words[0]).suffix in (".yaml", ".yml"):
            raise UserInputError(f"'{words[0]}' is not a script.", fix="Write the config before the two dashes.")
        if words[0].startswith("-"):
            raise UserInputError(f"'{words[0]}' is not a script.", fix=_USAGE)
        return cls(words[0], tuple(words[1:]))

    def check(self) -> None:
        """Raises UserInputError if the file is not here. A module is looked up by the ranks."""
        path = Path(self.target)
        if self.is_module or path.is_file():
            return
        here = " It is a folder." if path.is_dir() else ""
        raise UserInputError(
            f"There is no file '{self.target}'.{here}",
            why=f"The current folder is {Path.cwd()}.",
            fix="Correct the path of the script (in a pod it is in the image or on a volume); a module of a package is "
            "-- -m package.module.",
        )

    @property
    def name(self) -> str:
        """For headings: `train.py`, or `-m package.module`."""
        return f"-m {self.target}" if self.is_module else Path(self.target).name

    @property
    def words(self) -> list[str]:
        """As `parse` takes them."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @property
    def _lasting_words(self) -> list[str]:
        following = [*self.words[1:], "-"]
        return [
            word
            for word, next_word in zip(self.words, following, strict=True)
            if not (word == "--resume" and next_word.startswith("-"))
        ]

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def identity(self) -> str:
        """The same for the same command line, with or without a `--resume` that names nothing: it says what starting
        the same run again means anyway."""
        return hashlib.sha256(json.dumps(self._lasting_words).encode()).hexdigest()
