"""What does docs/commands.md say? Every command and option: `python -m shardtune.cli.reference docs`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from shardtune.cli.main import app

_HEAD = """# Commands

<!-- Generated: python -m shardtune.cli.reference docs > docs/commands.md -->

`shardtune COMMAND --help` prints the same. `CONFIG` is a run's YAML file; `--config FILE` says the same. `RUN` is a
run's folder, or its id under `runs` or another folder of runs here (`--runs-dir`); a unique prefix is enough.
`-o KEY=VALUE` sets any [setting](config-reference.md) and may be repeated; such values are typed and checked like those
of the file. Exit codes: [exit-codes.md](exit-codes.md).

`shardtune --install-completion` installs completion (bash, zsh, fish) of commands, options, settings after `-o` and
`explain`, and ids of runs."""


def page(docs: Path) -> str:
    """docs/commands.md. Pages that help texts name, such as docs/run.md, become links where that folder has them."""
    commands = list(every_command())
    overview = [f"| [`{name}`](#{_anchor(name)}) | {_cell(_first(command))} |" for name, command in commands]
    parts = ["\n".join(["| command | what it does |", "|---|---|", *overview])]
    parts += [_section(name, command) for name, command in commands]
    return "\n\n".join([_HEAD, *(_linked(part, docs) for part in parts)]) + "\n"


def _linked(text: str, docs: Path) -> str:
    def link(name: re.Match[str]) -> str:
        return f"[{name[1]}]({name[1]})" if (docs / name[1]).is_file() else name[0]

    return re.sub(r"docs/([\w-]+\.md)", link, text)


def every_command() -> Iterator[tuple[str, Any]]:
    """Those that do something, in the order of `shardtune --help`: `config show`, not `config`."""
    yield from _commands("shardtune", typer.main.get_command(app))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, below in command.commands.items():
        yield from _commands(f"{name} {word}", below)


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)]).replace("…]...", "…]")
    text = "\n\n".join(" ".join(part.split()) for part in _help(command).split("\n\n"))
    lines = [f"## {name}", "", _prose(text), "", "```text", usage, "```"]
    records = [param.get_help_record(context) for param in command.params]
    rows = [f"| `{_value(name)}` | {_cell(help)} |" for name, help in filter(None, records)]
    if rows:
        lines += ["", "| argument or option | meaning |", "|---|---|", *rows]
    return "\n".join(lines)


def _value(record: str) -> str:
    """`--to <a|b>` without the angle brackets; of an argument (`CONFIG <path>`) only its name."""
    words = re.sub(r" <([^>]*)>$", r" \1" if re.match("--?[a-z]", record) else "", record)
    return words.replace("|", r"\|")


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "").partition("\f")[0].strip()


def _first(command: Any) -> str:
    return " ".join(_help(command).split("\n\n")[0].split())


def _prose(text: str) -> str:
    """What Markdown would take for HTML or emphasis stays text."""
    return text.replace("<", "&lt;").replace("*", r"\*")


def _cell(text: str) -> str:
    text = re.sub(r"\[default: \(([^()]*)\)", r"[default: \1", " ".join(text.split()))
    return _prose(text).replace("|", r"\|")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
