"""How is an answer shown in a terminal? As it is generated; base and tuned model in two columns where there is room."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardtune import terminal
from shardtune.inference.answers import AnsweringModel, Questions, Reply
from shardtune.inference.sampling import Sampling

_LABEL = 10  # columns, as `terminal.say` has them
_NARROW = 60  # below this, two columns are no longer read easily
NO_END = "training had no end token after an answer: answers may go on to the maximum of new tokens"
# What could move the cursor or change the terminal: a model writes what it likes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str, out: IO[str]) -> str:
    """Text as it is written; on a terminal without control characters."""
    return _CONTROL.sub("", text) if out.isatty() else text


def announce(console: Console, questions: Questions, *, compare: bool, system: str | None = None) -> None:
    """What is asked, and how; on stderr, before the weights are read."""
    tuned = questions.tuned
    base = tuned.base.model_name_or_path
    terminal.say(console, "model", f"{tuned.adapter} on {base}{'; beside it the base alone' if compare else ''}")
    terminal.say(console, "asked", questions.format.description)
    if system is not None:
        terminal.say(console, "system", system)
    sides = questions.sides
    if compare and sides["base"].tokenizer is not sides["tuned"].tokenizer:
        terminal.say(console, "notice", "the base is asked with its own tokenizer: it does not know the new tokens")
    if questions.ignored:
        names = ", ".join(f"{name} {value}" for name, value in questions.ignored.items())
        terminal.say(console, "notice", f"generation_config.json of the base is not applied: {names}")
    if not questions.ends_told:
        terminal.say(console, "notice", NO_END)


def announce_choice(console: Console, model: AnsweringModel, sampling: Sampling, limit: str) -> None:
    """After the weights are read."""
    device = model.loaded.device
    dtype = str(model.loaded.model.get_base_model().dtype).removeprefix("torch.")
    terminal.say(console, "computed", f"on {device.type} in {dtype}, {sampling}, {limit}")


def interleaved(replies: Sequence[Reply]) -> Iterator[tuple[Reply, str]]:
    """The pieces of several answers in turn, so that they grow together."""
    running = {index: iter(reply) for index, reply in enumerate(replies)}
    while running:
        for index in list(running):
            piece = next(running[index], None)
            if piece is None:
                del running[index]
            else:
                yield replies[index], piece


def write_answer(reply: Reply, out: IO[str]) -> None:
    """One answer, as it comes."""
    for piece in reply:
        out.write(shown(piece, out))
        out.flush()
    out.write("\n")
    out.flush()


def write_answers(replies: Sequence[Reply], out: IO[str]) -> None:
    """Several answers to one question: in columns on a terminal, else one below the other under its name."""
    console = Console(file=out)
    if console.is_terminal and console.width >= _NARROW:
        # The growing table is taken away again, so that a long one does not leave its upper part behind.
        with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
            for _ in interleaved(replies):
                live.update(_columns(replies), refresh=True)
        console.print(_columns(replies))
        return
    for reply in replies:
        out.write(f"{reply.side.name + ':':<{_LABEL}}")
        write_answer(reply, out)


def _columns(replies: Sequence[Reply]) -> Table:
    table = Table(expand=True, box=None, padding=(0, 2, 0, 0))
    for reply in replies:
        table.add_column(reply.side.name, ratio=1, overflow="fold", header_style="bold")
    table.add_row(*(Text(_CONTROL.sub("", reply.text)) for reply in replies))
    return table


def how_it_ended(console: Console, replies: Sequence[Reply]) -> None:
    """Says it where an answer is not whole."""
    for reply in replies:
        if reply.ended == "length":
            which = f"the {reply.side.name} answer" if len(replies) > 1 else "the answer"
            text = f"{which} was cut at {reply.limit} new tokens (--max-new-tokens)"
            terminal.say(console, "notice", text)


def stderr_console() -> Console:
    return Console(file=sys.stderr)
