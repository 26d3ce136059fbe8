"""docs/commands.md is what the command line says of itself."""

from __future__ import annotations

import re

from running import REPOSITORY

from shardtune.cli.reference import every_command, page


def test_the_page_is_what_the_command_line_says_today() -> None:
    docs = REPOSITORY / "docs"
    assert (docs / "commands.md").read_text(encoding="utf-8") == page(docs), "make reference renews it"


def test_every_command_has_a_section_with_each_of_its_options() -> None:
    text = page(REPOSITORY / "docs")
    found = dict(every_command())
    assert {"shardtune train", "shardtune config show", "shardtune cluster lint"} <= set(found)
    for name, command in found.items():
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        shown = [word for param in command.params for word in param.opts if word.startswith("-")]
        assert [word for word in shown if word not in section] == [], name


def test_what_an_option_takes_is_named_in_capitals_or_by_its_choices() -> None:
    takes = re.findall(r"^\| `(?:-\w, )?(?:--[\w-]+(?:, -\w)?) ([^`/-][^`]*)`", page(REPOSITORY / "docs"), re.MULTILINE)
    assert len(takes) > 100
    assert [
        word for word in takes if re.fullmatch(r"(int|integer|float|path|text|file|directory)( range)?", word)
    ] == []
