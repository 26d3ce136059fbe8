"""What does a trained model answer to these prompts? `shardtune generate`, from prompts to answers on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from shardtune.data.messages import Message
from shardtune.errors import UserInputError
from shardtune.inference.answers import (
    DEFAULT_NEW_TOKENS,
    AnswerOptions,
    Questions,
    Reply,
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
    write_answers,
)
from shardtune.inference.source import TunedModel
from shardtune.inference.trained_format import TrainedFormat
from shardtune.run.exit_codes import DONE, INTERRUPTED


def generate(
    tuned: TunedModel,
    trained: TrainedFormat,
    prompts: Sequence[GivenPrompt],
    options: AnswerOptions,
    *,
    as_json: bool = False,
) -> int:
    """Answers all prompts; returns the exit code.

    Raises:
        UserInputError: a prompt cannot be asked (before the weights are read), or the model cannot be loaded.
    """
    device = named_device(options.device)
    questions = prepare_questions(tuned, trained)
    conversations = _conversations(prompts, options, questions)
    console = stderr_console()
    announce(console, questions, compare=options.compare, system=options.system)
    model = load_answering(questions, device)
    sampling = options.sampling.seeded()
    announce_choice(console, model, sampling, f"up to {options.max_new_tokens or DEFAULT_NEW_TOKENS} new tokens")
    for number, (prompt, messages) in enumerate(zip(prompts, conversations, strict=True)):
        with StopOnInterrupt() as stopped:
            replies = [
                model.reply(messages, side, sampling, options.max_new_tokens, stopped=stopped) for side in options.sides
            ]
            if as_json:
                _write_json(prompt, replies, sampling)
            else:
                if len(conversations) > 1:
                    _write_prompt(messages, first=number == 0)
                write_answers(replies, sys.stdout)
        how_it_ended(console, replies)
        if stopped():
            return INTERRUPTED
    return DONE


def _conversations(prompts: Sequence[GivenPrompt], options: AnswerOptions, questions: Questions) -> list[list[Message]]:
    """All prompts as messages. Raises UserInputError for one that lacks something, or that a side cannot be asked."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            messages = with_system(_messages(prompt, questions), options.system)
            for side in options.sides:
                questions.prompt(messages, side, options.max_new_tokens)
        except UserInputError as error:
            if len(prompts) == 1:
                raise
            which = f"Prompt {number} of {len(prompts)}"
            raise UserInputError(f"{which}: {error.what}", why=error.why, fix=error.fix) from error
        found.append(messages)
    return found


def _messages(prompt: GivenPrompt, questions: Questions) -> list[Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return questions.format.messages_of(prompt)


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
