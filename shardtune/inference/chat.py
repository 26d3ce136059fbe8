"""How does a conversation with a trained model go on? `shardtune chat` in a terminal, or line by line from a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from shardtune import terminal
from shardtune.data.messages import Message
from shardtune.errors import UserInputError
from shardtune.inference.answers import (
    DEFAULT_NEW_TOKENS,
    AnsweringModel,
    AnswerOptions,
    Questions,
    Reply,
    SideName,
    check_system,
    load_answering,
    named_device,
    prepare_questions,
    with_system,
)
from shardtune.inference.interrupt import StopOnInterrupt
from shardtune.inference.prompt_files import stdin_lines
from shardtune.inference.screen import (
    announce,
    announce_choice,
    how_it_ended,
    stderr_console,
    write_answers,
)
from shardtune.inference.source import TunedModel
from shardtune.inference.trained_format import TrainedFormat
from shardtune.run.exit_codes import DONE
from shardtune.run.failure import render

_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/save FILE": "write the conversation as JSON",
    "/quit, Ctrl-D": "leave",
    "Ctrl-C": "stop an answer",
}
_PROMPT = "> "


@dataclass
class Chat:
    """A conversation with each side, which may take different courses.

    Attributes:
        histories: What was said so far, without the system prompt; of formats without turns nothing is remembered.
        record: All questions and answers, for `/save`.
    """

    questions: Questions
    options: AnswerOptions
    system: str | None
    histories: dict[SideName, list[Message]] = field(default_factory=dict)
    record: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.histories = {side: [] for side in self.options.sides}
        self.record = []

    def set_system(self, text: str | None) -> None:
        """Raises UserInputError where the format has no place for one."""
        check_system(self.questions, text)
        self.system = text

    def ask(self, model: AnsweringModel, text: str, stopped: StopOnInterrupt) -> list[Reply]:
        """The replies of all sides, to be iterated over; then `remember` them."""
        sampling = self.options.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + self.turns)  # not the same draws for every answer
        asked: Message = {"role": "user", "content": text}
        return [
            model.reply(
                with_system([*history, asked], self.system), side, sampling, self.options.max_new_tokens, stopped
            )
            for side, history in self.histories.items()
        ]

    def remember(self, text: str, replies: Sequence[Reply]) -> None:
        """An answer that was stopped counts as far as it came; one that never began is as if nothing was asked."""
        self.turns += 1
        self.record.append({"prompt": text, **{reply.side.name: reply.text for reply in replies}})
        if not self.questions.format.has_turns:
            return
        for reply in replies:
            if reply.text or reply.ended == "end":
                self.histories[reply.side.name] += [
                    {"role": "user", "content": text},
                    {"role": "assistant", "content": reply.text},
                ]

    def save(self, name: str) -> Path:
        """Raises UserInputError if it cannot be written, or is there already."""
        path = Path(name).expanduser()
        content = {"model": str(self.questions.tuned.adapter), "system": self.system, "turns": self.record}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise UserInputError(
                f"Cannot write '{path}'.", why=error.strerror or str(error), fix="Give a new file in a writable folder."
            ) from error
        return path


def chat(tuned: TunedModel, trained: TrainedFormat, options: AnswerOptions) -> int:
    """Answers until its user leaves; returns the exit code.

    Raises:
        UserInputError: the model cannot be loaded or asked; without a terminal also for a line that cannot be asked.
    """
    device = named_device(options.device)
    questions = prepare_questions(tuned, trained)
    check_system(questions, options.system)
    console = stderr_console()
    announce(console, questions, compare=options.compare, system=options.system)
    if not questions.format.has_turns:
        terminal.say(console, "notice", "each question stands alone: training had no conversations")
    model = load_answering(questions, device)
    announce_choice(
        console, model, options.sampling, f"up to {options.max_new_tokens or DEFAULT_NEW_TOKENS} new tokens an answer"
    )
    conversation = Chat(questions, options, options.system)
    interactive = sys.stdin.isatty()
    if interactive:
        _say_commands(console)
    for line in _terminal_lines() if interactive else stdin_lines():
        try:
            if not _handle_line(line, conversation, model, console):
                break
        except UserInputError as error:
            if not interactive:
                raise
            print(terminal.fitted(render(error), sys.stderr), file=sys.stderr)
    return DONE


def _handle_line(line: str, conversation: Chat, model: AnsweringModel, console: Console) -> bool:
    """Does what a line says; False: leave."""
    if line.startswith("/"):
        return _run_command(line, conversation, console)
    if conversation.questions.format.kind != "text":  # a text is continued to the character
        line = line.strip()
    with StopOnInterrupt() as stopped:
        replies = conversation.ask(model, line, stopped)
        write_answers(replies, sys.stdout)
    conversation.remember(line, replies)
    how_it_ended(console, replies)
    return True


def _run_command(line: str, conversation: Chat, console: Console) -> bool:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/quit", "/exit", "/bye"):
        return False
    if name == "/reset":
        conversation.reset()
        terminal.say(console, "reset", "a new conversation")
    elif name == "/system":
        conversation.set_system(rest or None)
        terminal.say(console, "system", rest or "none")
    elif name == "/save" and rest:
        terminal.say(console, "saved", str(conversation.save(rest)))
    elif name == "/help":
        _say_commands(console)
    else:
        if name == "/save":
            raise UserInputError("/save needs the name of a file.", fix="For example: /save chat.json")
        raise UserInputError(
            f"There is no command '{name}'.",
            fix="/help lists the commands. A question that begins with / is asked with a space before it.",
        )
    return True


def _say_commands(console: Console) -> None:
    terminal.say(console, "commands", ", ".join(f"{name} ({what})" for name, what in _COMMANDS.items()))


def _terminal_lines() -> Iterator[str]:
    """Lines from a terminal, with history and line editing; Ctrl-D ends them."""
    import readline  # noqa: F401 - `input` edits lines with it

    prompt = _PROMPT if sys.stdout.isatty() else ""  # `input` would write it among the answers
    while True:
        if not prompt:
            print(_PROMPT, end="", file=sys.stderr, flush=True)
        try:
            line = input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves.)", file=sys.stderr)
            continue
        if line.strip():
            yield line
