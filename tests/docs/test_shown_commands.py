"""Nothing that a page tells its readers to type goes unnoticed: it is parsed here, and run in test_commands_run.py."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from not_run import ELSEWHERE, OTHERS, reason
from running import REPOSITORY
from shown_commands import (
    PAGES,
    ShownCommand,
    commands_in_sentences,
    commands_of,
    hidden_commands,
    shown_commands,
)

SHOWN = shown_commands()
OURS = [command for command in SHOWN if "shardtune" in command.words[:6]]


@cache
def command_line() -> Any:
    from shardtune.cli.main import app

    return typer.main.get_command(app)


def parse(words: list[str]) -> Any:
    """The command that these words call, after all of its options have been parsed; nothing is called."""
    command, context = command_line(), None
    while True:
        context = command.make_context(command.name, list(words), parent=context)
        if not hasattr(command, "commands"):
            return command
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def test_there_are_commands_on_the_pages() -> None:
    assert len(OURS) > 80 and len({command.page for command in SHOWN}) > 15


@pytest.mark.parametrize("command", OURS, ids=lambda command: command.place)
def test_a_command_of_ours_has_the_options_it_is_shown_with(command: ShownCommand) -> None:
    words = command.words
    parse(words[words.index("shardtune") + 1 :])


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["train", "run.yaml", "--epochs", "3"])
    with pytest.raises(Exception, match="No such command"):
        parse(["data", "show", "run.yaml"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_hides_where_it_is_not_tested(page: Path) -> None:
    assert hidden_commands(page.read_text(encoding="utf-8")) == []


def named(words: list[str]) -> tuple[str, set[str]]:
    """The command that these words name, and the options given to it; both have to exist."""
    command, name = command_line(), ""
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = f"{name} {words[0]}".strip()
        command, *words = command.commands[words[0]], *words[1:]
    words = words[: words.index("--")] if "--" in words else words
    options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    assert options <= {*known, "--help", *(["--version", "--install-completion"] if not name else [])}, options - known
    return name, {param.name for param in command.params if options & {*param.opts, *param.secondary_opts}}


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=lambda page: page.name)
def test_a_command_in_a_sentence_is_run_on_some_page(page: Path) -> None:
    """With these options at least; a name alone only has to be that of a command."""
    run = [named(command.words[command.words.index("shardtune") + 1 :]) for command in OURS]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for text in commands_in_sentences(page.read_text(encoding="utf-8")):
        program, *words = text.partition(";")[0].replace("'", "").split()
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), text
        elif program == "python" and words[0].endswith(".py"):
            assert (REPOSITORY / words[0]).is_file(), text
        elif program == "shardtune" and words[0] != "COMMAND":
            name, options = named(words)
            assert not name or not options or any(name == other and options <= given for other, given in run), text


def test_what_is_not_run_says_why_and_is_still_shown() -> None:
    texts = [command.text for command in SHOWN]
    for start in {**OTHERS, **ELSEWHERE}:
        assert any(text.startswith(start) for text in texts), f"{start!r} stands on no page any more"
    for command in SHOWN:
        assert command in OURS or reason(command.text), f"{command.place}: not ours, and not in not_run.py"
    for test in re.findall(r"tests/[\w/.]+\.py", " ".join([*OTHERS.values(), *ELSEWHERE.values()])):
        assert (REPOSITORY / test).is_file(), test


def test_make_has_the_targets_and_pip_the_extras_that_are_shown() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command in SHOWN:
        if command.words[0] == "make":
            assert re.search(rf"^{command.words[1]}:", makefile, re.MULTILINE), command.place
        for extra in re.findall(r"(?:\.|shardtune)\[([\w,]+)\]", command.text):
            assert set(extra.split(",")) <= set(project["optional-dependencies"]), command.place


def test_commands_are_found_as_they_would_be_typed() -> None:
    page = "text\n\n```console\n$ shardtune train \\\n    run.yaml   # here\noutput\n$ pip x\n```\n\n**`a.sh`**\n\n```bash\npip y\n```\n"
    found = [ShownCommand("p", text).words for text in commands_of(page)]
    assert found == [["shardtune", "train", "run.yaml"], ["pip", "x"]]
    assert hidden_commands(page) == []
    hidden = ["shardtune train run.yaml", "$ shardtune train", "  pip x y"]
    block = "\n".join([*hidden, "shardtune 0.1.0  run x", "shardtune init [OPTIONS]"])
    for kind in ("", "text", "sh title=x"):
        assert hidden_commands(f"look:\n\n```{kind}\n{block}\n```\n") == hidden
    assert hidden_commands("look:\n\n```console\n$ pip x\n  pip y z\n```\n") == ["  pip y z"]
    assert hidden_commands("1. Type\n\n    $ shardtune train\n") == ["    $ shardtune train"]
    assert hidden_commands("1. Type\n\n   ```console\n   $ shardtune train\n   ```\n") != []
    assert commands_in_sentences("a `shardtune\ntrain x` and `data.md`") == ["shardtune train x"]
