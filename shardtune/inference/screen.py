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
_MOST_SHOWN = 80  # characters of a system prompt
_NARROW = 60  # below this, two columns are no longer read easily
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
    for note in notes(questions, compare=compare):
        terminal.say(console, "notice", note)


def notes(questions: Questions, *, compare: bool) -> list[str]:
    """What else there is to know of how a model is asked."""
    found = [questions.tuned.notice] if questions.tuned.notice else []
    sides = questions.sides
    if compare and sides["base"].tokenizer is not sides["tuned"].tokenizer:
        found.append("the base is asked with its own tokenizer: it does not know the new tokens")
    if questions.format.default_system:
        own = questions.format.default_system.splitlines()[0]
        own = own if len(own) <= _MOST_SHOWN else f"{own[:_MOST_SHOWN]}…"
        found.append(f"where no system prompt is given, the chat template writes its own: “{own}”")
    if questions.ignored:
        names = ", ".join(f"{name} {value}" for name, value in questions.ignored.items())
        found.append(f"not applied of the base's generation_config.json: {names}")
    if not questions.answers_end:
        found.append("training had no end token after an answer: answers may go on to the maximum of new tokens")
    return found


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


def _write_answer(reply: Reply, out: IO[str]) -> None:
    for piece in reply:
        out.write(shown(piece, out))
        out.flush()
    out.write("\n")
    out.flush()


def write_answers(replies: Sequence[Reply], out: IO[str]) -> None:
    """The answers to one question, as they come; several in columns on a terminal, else under each other by name."""
    if len(replies) == 1:
        _write_answer(replies[0], out)
        return
    console = Console(file=out)
    if console.is_terminal and console.width >= _NARROW:
        # While it grows, only the end of an answer is shown that is longer than the screen: what is above cannot be
        # redrawn. Then the table is taken away, and all of it is printed.
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for _ in interleaved(replies):
                live.update(
                    _columns(replies, [_last_lines(reply, console, len(replies)) for reply in replies]), refresh=True
                )
        console.print(_columns(replies, [_text(reply) for reply in replies]))
        return
    for reply in replies:
        out.write(f"{reply.side.name + ':':<{_LABEL}}")
        _write_answer(reply, out)


def _columns(replies: Sequence[Reply], texts: Sequence[Text]) -> Table:
    table = Table(expand=True, box=None, padding=(0, 2, 0, 0))
    for reply in replies:
        table.add_column(reply.side.name, ratio=1, overflow="fold", header_style="bold")
    table.add_row(*texts)
    return table


def _text(reply: Reply) -> Text:
    return Text(_CONTROL.sub("", reply.text))


def _last_lines(reply: Reply, console: Console, columns: int) -> Text:
    lines = _text(reply).wrap(console, console.width // columns - 2, overflow="fold")
    return Text("\n").join(lines[-max(1, console.height - 2) :])


def how_it_ended(console: Console, replies: Sequence[Reply]) -> None:
    """Says it where an answer is not whole."""
    for reply in replies:
        which = f"the {reply.side.name} answer" if len(replies) > 1 else "the answer"
        if reply.ended == "stopped":
            terminal.say(console, "stopped", f"{which}, after {terminal.count(reply.tokens, 'token')}")
        if reply.ended == "length":
            why = "the model was made for no more" if reply.fills_model else "--max-new-tokens"
            terminal.say(console, "notice", f"{which} was cut at {reply.limit} new tokens ({why})")


def stderr_console() -> Console:
    return Console(file=sys.stderr)
