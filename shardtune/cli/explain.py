"""`shardtune explain WORD`: what a setting, an exit code or an error means. Starts nothing."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from shardtune.config.explain import Answer
    from shardtune.run.error_codes import ErrorCode


def complete_word(incomplete: str) -> list[str]:
    """For shell completion: settings with and without their section, sections and error codes."""
    from shardtune.config.explain import all_settings
    from shardtune.config.suggestions import section_fields
    from shardtune.run.error_codes import BY_CODE

    settings = all_settings()
    keys = dict.fromkeys(path.partition(".")[2] for path in settings)
    return [word for word in (*section_fields(), *settings, *keys, *BY_CODE) if word.startswith(incomplete)]


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY | EXIT_CODE | ERROR]",
            help="A setting (train.seed, seed), a section, a name of accelerate or TRL, an exit code (76), an error "
            "code (out-of-memory), or an error message in quotes.",
            show_default=False,
            autocompletion=complete_word,
        ),
    ] = None,
) -> None:
    """Say what a setting does (default, values, FSDP2, resuming), or what an error means and what to do.

    Without an argument: the sections and the error codes.

    Exit codes: 0 explained; 2 nothing is known by that name.
    """
    from rich.console import Console

    from shardtune.config.explain import find
    from shardtune.run.error_codes import BY_CODE, code_of_message

    console, text = Console(highlight=False), " ".join(words or ()).strip()
    number = re.fullmatch(r"(?:exit\s*)?(?:code\s*)?(\d{1,3})", text, re.IGNORECASE)
    code = BY_CODE.get(text.lower().replace(" ", "-").replace("_", "-"))
    if not text:
        _overview(console)
    elif number:
        _exit_code(console, int(number[1]))
    elif code is not None:
        _error(console, code)
    elif (answer := find(text)) is not None:
        _answer(console, answer)
    elif known := code_of_message(text):
        _error(console, BY_CODE[known])
    else:
        _refuse(text)


def _overview(console: Console) -> None:
    from shardtune.config.suggestions import section_fields
    from shardtune.run.error_codes import BY_CODE
    from shardtune.terminal import count, say

    for name, section in section_fields().items():
        say(console, name, f"{section.__doc__} ({count(len(section.model_fields), 'setting')})")
    say(console, "errors", ", ".join(BY_CODE))
    say(console, "example", "shardtune explain lora; shardtune explain max_length; shardtune explain out-of-memory")


def _answer(console: Console, answer: Answer) -> None:
    from shardtune.config.suggestions import section_fields
    from shardtune.terminal import width_of, wrapped

    if answer.remark:
        console.print(wrapped(answer.remark, width_of(console), 2), markup=False, soft_wrap=True)
    if answer.kind == "section":
        (section,) = answer.paths
        _list(console, section, [f"{section}.{key}" for key in section_fields()[section].model_fields])
    elif len(answer.paths) == 1:
        _setting(console, answer.paths[0])
    else:
        _list(console, "", list(answer.paths))


def _list(console: Console, section: str, paths: list[str]) -> None:
    """Each setting with its default and the first sentence about it."""
    from rich.table import Table
    from rich.text import Text

    from shardtune.config.explain import page_of, setting_facts
    from shardtune.config.reference import first_sentence
    from shardtune.config.suggestions import section_fields

    if section:
        console.print(f"[bold]{section}[/]  {section_fields()[section].__doc__}", soft_wrap=True)
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for path in paths:
        facts = setting_facts(path)
        table.add_row(path, Text(f"{facts.default}  ", style="dim") + Text(first_sentence(facts.meaning)))
    console.print(table)
    if section and (page := page_of(section)):
        console.print(f"docs/{page}, docs/config-reference.md#{section}")


def _setting(console: Console, path: str) -> None:
    from shardtune.checkpoint.changes import VERDICTS
    from shardtune.config.explain import setting_facts
    from shardtune.terminal import say, width_of, wrapped

    facts, verdict = setting_facts(path), VERDICTS[path]
    console.print(f"[bold]{path}[/]")
    console.print(wrapped(facts.meaning, width_of(console)), markup=False, soft_wrap=True)
    resume = {
        "free": "may change: no result depends on it",
        "notice": f"may change, and the run says so: {verdict.meaning}",
        "refused": f"must stay the same: {verdict.meaning}",
        "batch": "may change as long as per-device batch × processes × accumulation stays the same",
    }[verdict.kind]
    lines = [
        ("values", facts.values),
        ("default", facts.default),
        ("FSDP2", facts.fsdp2),
        ("resume", resume),
        *(("refused", need) for need in facts.needs),
        ("needed by", ", ".join(facts.needed_by)),
        ("elsewhere", ", ".join(facts.names)),
        ("docs", ", ".join(f"docs/{page}" for page in (facts.page, "config-reference.md") if page)),
    ]
    for label, text in lines:
        if text:
            say(console, label, text)


def _exit_code(console: Console, code: int) -> None:
    from shardtune.run.error_codes import ERROR_CODES
    from shardtune.run.exit_codes import EXIT_CODES
    from shardtune.terminal import say

    known = EXIT_CODES.get(code)
    if known is None:
        try:
            name = signal.Signals(code - 128).name
        except ValueError:
            _refuse(f"exit code {code}")
        say(console, f"exit {code}", f"A process was ended by signal {code - 128} ({name}): 128 + {code - 128}.")
    else:
        say(console, f"exit {code}", known.meaning)
        say(console, "restart", known.restart.replace("**", ""))
    is_signal = known is None or code == 128 + signal.SIGKILL
    causes = [e.code for e in ERROR_CODES if e.exit_code == code or (e.exit_code is None and is_signal)]
    if causes:
        say(console, "errors", f"{', '.join(causes)} (shardtune explain {causes[0]})")
    say(console, "docs", "docs/exit-codes.md")


def _error(console: Console, error: ErrorCode) -> None:
    from shardtune.terminal import say

    console.print(f"[bold]{error.code}[/]")
    say(console, "meaning", error.meaning)
    for number, cause in enumerate(error.causes):
        say(console, "" if number else "causes", cause)
    for number, fix in enumerate(error.fixes):
        say(console, "" if number else "fix", fix)
    say(console, "exit code", "128 + signal" if error.exit_code is None else str(error.exit_code))
    say(console, "docs", f"docs/{error.page}")


def _refuse(text: str) -> NoReturn:
    from shardtune.config.explain import guess
    from shardtune.config.suggestions import close_words
    from shardtune.errors import UserInputError
    from shardtune.run.error_codes import BY_CODE

    close = [*guess(text), *close_words(text, BY_CODE)]
    raise UserInputError(
        f"There is no setting, exit code or error known as '{text}'.",
        fix=f"Did you mean {' or '.join(close)}?" if close else "`shardtune explain` lists sections and errors.",
    )
