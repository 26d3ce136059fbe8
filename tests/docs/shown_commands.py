"""Which commands do the pages show? Lines behind `$ ` in console blocks, comments of recipes, and code inside sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from running import REPOSITORY

PAGES = (
    REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "examples").glob("*/README.md")),
)  # fmt: skip
COMMENTED = (*sorted((REPOSITORY / "configs").glob("*.yaml")), REPOSITORY / "Containerfile")
PROGRAMS = (
    "shardtune", "make", "pip", "python", "python3", "torchrun", "accelerate", "podman", "docker", "kubectl", "oc", "hf",
    "openssl", "export", "pre-commit",
)  # fmt: skip
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^(?P<above>[^\n]*)\n\n?^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class ShownCommand:
    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell would split it: without comments, and without what is redirected."""
        words = shlex.split(self.text, comments=True)
        return words[: words.index(">")] if ">" in words else words

    @property
    def place(self) -> str:
        return f"{self.page}: {self.text}"


def shown_commands() -> list[ShownCommand]:
    found = [
        ShownCommand(_name(page), text) for page in PAGES for text in commands_of(page.read_text(encoding="utf-8"))
    ]
    return found + [ShownCommand(_name(file), text) for file in COMMENTED for text in _commented(file)]


def commands_of(page: str) -> Iterator[str]:
    """The commands of a page; one that goes on after a backslash is one."""
    for block in _BLOCK.finditer(page):
        if block["kind"] == "console":
            lines = iter(block["text"].splitlines())
            for line in lines:
                if line.startswith("$ "):
                    command = line.removeprefix("$ ")
                    while command.endswith("\\"):
                        command = command[:-1].rstrip() + " " + next(lines).strip()
                    yield command


def commands_in_sentences(page: str) -> list[str]:
    """Code inside of sentences and tables that begins like a command of ours or of the repository."""
    spans = re.findall(r"`([^`]+)`", _FENCED.sub("", page))
    return [" ".join(span.split()) for span in spans if re.match(r"(?:shardtune|make|python|pip)\s+\S", span)]


def hidden_commands(page: str) -> list[str]:
    """Lines that look as if they were to be typed, where `commands_of` does not find them: nobody would test them.

    A block below a bold file name is that file.
    """
    found = [line for line in _FENCED.sub("", page).splitlines() if re.match(r"\s*(?:```|~~~|\$ )", line)]
    for block in _BLOCK.finditer(page):
        shown = {line for line in block["text"].splitlines() if block["kind"] == "console" and line.startswith("$ ")}
        if not block["above"].startswith("**`"):
            found += [line for line in block["text"].splitlines() if line not in shown and _is_command(line)]
    return found


def _is_command(line: str) -> bool:
    line = re.sub(r"^ {0,4}(?:\$ )?", "", line)
    word, _, rest = line.partition(" ")
    return word in PROGRAMS and rest != "" and not re.search(r"\[OPTIONS\]|\S  +\S", line.partition("#")[0])


def _commented(file: Path) -> list[str]:
    """`#   shardtune train …` in a recipe."""
    lines = re.findall(r"^#   (\S+ .*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return [line for line in lines if line.partition(" ")[0] in PROGRAMS]


def _name(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))
