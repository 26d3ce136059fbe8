"""What does a trained model answer to these prompts? `shardtune generate`, from prompts to answers on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shardtune.data.messages import Message
from shardtune.inference.answers import (
    DEFAULT_NEW_TOKENS,
    Questions,
    Reply,
    SideName,
    load_answering,
    named_device,
    prepare_questions,
    with_system,
)
from shardtune.inference.interrupt import StopOnInterrupt
from shardtune.inference.prompt_files import GivenPrompt
from shardtune.inference.sampling import Sampling
from shardtune.inference.screen import (
    announce,
    announce_choice,
    how_it_ended,
    shown,
    stderr_console,
    write_answer,
    write_answers,
)
from shardtune.inference.source import TunedModel
from shardtune.inference.trained_format import TrainedFormat
from shardtune.run.exit_codes import DONE, INTERRUPTED


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        max_new_tokens: None: the default, or what the model has room for.
        device: None: the first GPU, or the CPU.
    """

    prompts: Sequence[GivenPrompt]
    sampling: Sampling
    system: str | None = None
    max_new_tokens: int | None = None
    compare: bool = False
    as_json: bool = False
    device: str | None = None

    @property
    def sides(self) -> tuple[SideName, ...]:
        return ("base", "tuned") if self.compare else ("tuned",)


def generate(tuned: TunedModel, trained: TrainedFormat, asked: Asked) -> int:
    """Answers all prompts; returns the exit code.

    Raises:
        UserInputError: a prompt cannot be asked (before the weights are read), or the model cannot be loaded.
    """
    device = named_device(asked.device)
    questions = prepare_questions(tuned, trained)
    conversations = [conversation(prompt, questions, asked.system) for prompt in asked.prompts]
    for messages in conversations:
        for side in asked.sides:
            questions.sides[side].format.encode(messages)
    console = stderr_console()
    announce(console, questions, compare=asked.compare, system=asked.system)
    model = load_answering(questions, device)
    sampling = asked.sampling.seeded()
    announce_choice(console, model, sampling, f"up to {asked.max_new_tokens or DEFAULT_NEW_TOKENS} new tokens")
    for number, (prompt, messages) in enumerate(zip(asked.prompts, conversations, strict=True)):
        with StopOnInterrupt() as stopped:
            replies = [
                model.reply(messages, side, sampling, asked.max_new_tokens, stopped=stopped) for side in asked.sides
            ]
            if asked.as_json:
                _write_json(prompt, replies, sampling)
            else:
                if len(conversations) > 1:
                    _write_prompt(messages, first=number == 0)
                _write(replies)
        how_it_ended(console, replies)
        if stopped():
            return INTERRUPTED
    return DONE


def conversation(prompt: GivenPrompt, questions: Questions, system: str | None) -> list[Message]:
    """A prompt as messages. Raises UserInputError for a row that lacks something."""
    messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else questions.format.messages_of(prompt)
    )
    return with_system(messages, system)


def _write(replies: Sequence[Reply]) -> None:
    if len(replies) == 1:
        write_answer(replies[0], sys.stdout)
    else:
        write_answers(replies, sys.stdout)


def _write_prompt(messages: Sequence[Message], *, first: bool) -> None:
    """Above an answer, where there are several."""
    asked = shown(str(messages[-1]["content"]), sys.stdout)
    print(f"{'' if first else chr(10)}> " + asked.replace("\n", "\n> "), flush=True)


def _write_json(prompt: GivenPrompt, replies: Sequence[Reply], sampling: Sampling) -> None:
    for reply in replies:
        for _ in reply:
            pass
    answers = {reply.side.name: {"text": reply.text, "tokens": reply.tokens, "ended": reply.ended} for reply in replies}
    asked = {"prompt": prompt, "asked": replies[-1].prompt.text, "prompt_tokens": len(replies[-1].prompt.ids)}
    choice = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    line = json.dumps({**asked, **answers, "sampling": choice}, ensure_ascii=False)
    # JSON allows these as they are, but to many readers of lines they end one.
    print(line.translate({number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}), flush=True)
