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
from shown_commands import PAGES, ShownCommand, commands_of, hidden_commands, shown_commands

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
def test_no_command_hides_in_a_block_that_is_not_tested(page: Path) -> None:
    assert hidden_commands(page.read_text(encoding="utf-8")) == []


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
    assert hidden_commands("look:\n\n```\nshardtune train run.yaml\nshardtune 0.1.0  run x\n```\n") == [
        "shardtune train run.yaml"
    ]
