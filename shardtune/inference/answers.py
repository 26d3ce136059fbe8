"""What does a trained model answer? A conversation in, text out as it is generated; by the tuned model or its base."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardtune.data.checks import model_positions
from shardtune.data.messages import Message
from shardtune.errors import UserInputError
from shardtune.inference.decoding import Decoder
from shardtune.inference.load import LoadedModel, load_tuned, load_tuned_tokenizer
from shardtune.inference.prompts import Prompt, PromptFormat, prompt_format
from shardtune.inference.sampling import Sampling, answer_ends, generation_defaults
from shardtune.inference.source import TunedModel
from shardtune.inference.text_stream import AnswerText, TokenText
from shardtune.inference.trained_format import TrainedFormat
from shardtune.model.load import load_tokenizer, model_folder
from shardtune.model.meta_model import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SideName = Literal["base", "tuned"]
Ended = Literal["end", "length", "stopped"]
DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True)
class AnswerOptions:
    """What the command line asks for.

    Attributes:
        max_new_tokens: None: the default, or what the model has room for.
        compare: The base model answers too.
        device: None: the first GPU, or the CPU.
    """

    sampling: Sampling
    system: str | None = None
    max_new_tokens: int | None = None
    compare: bool = False
    device: str | None = None

    @property
    def sides(self) -> tuple[SideName, ...]:
        return ("base", "tuned") if self.compare else ("tuned",)


@dataclass(frozen=True)
class Side:
    """How one of the two is asked, and what ends its answers.

    Attributes:
        ends: Ids of the tokens that end an answer.
    """

    name: SideName
    tokenizer: PreTrainedTokenizerBase
    format: PromptFormat
    ends: frozenset[int]


@dataclass
class Reply:
    """An answer as it comes: iterate over its pieces, then look at how it ended.

    Attributes:
        fills_model: `limit` is what the model's positions leave; more cannot be asked for.
        tokens: Generated so far, without the one that ended it.
        ended: `end`: the model has ended it; `length`: the maximum of new tokens; `stopped`: whoever asked.
    """

    side: Side
    prompt: Prompt
    limit: int
    decoder: Decoder
    answer: AnswerText
    stopped: Callable[[], bool]
    fills_model: bool = False
    tokens: int = 0
    ended: Ended | None = None

    @property
    def text(self) -> str:
        return self.answer.text

    def __iter__(self) -> Iterator[str]:
        pieces = TokenText(self.side.tokenizer, self.prompt.ids, special=bool(self.side.format.channel))
        while self.ended is None:
            piece = ""
            if self.stopped():
                self.ended = "stopped"
            elif self.tokens == self.limit:
                self.ended = "length"
            elif (token := self.decoder.next()) in self.side.ends:
                self.ended = "end"
            else:
                self.tokens += 1
                piece = self.answer.add(pieces.add(token))
                self.ended = "end" if self.answer.ended else None
            if piece:
                yield piece
        rest = "" if self.answer.ended else self.answer.add(pieces.finish(is_cut=self.ended != "end"))
        if rest := rest + self.answer.finish():
            yield rest


@dataclass(frozen=True)
class Questions:
    """How a model is asked: known before its weights are read, so that what cannot be asked costs no minutes.

    Attributes:
        answers_end: Training had an end token or a tail behind its answers; else they go on to the maximum.
        ignored: Settings of the base's generation_config.json that would change what is chosen. They are not used.
        positions: How many tokens the model was made for.
    """

    tuned: TunedModel
    trained: TrainedFormat
    sides: dict[SideName, Side]
    answers_end: bool
    ignored: dict[str, Any]
    positions: int | None

    @property
    def format(self) -> PromptFormat:
        return self.sides["tuned"].format

    def prompt(self, messages: Sequence[Message], side: SideName, max_new_tokens: int | None) -> tuple[Prompt, int]:
        """What a side reads of a conversation, and how many tokens may follow it.

        Raises:
            UserInputError: the conversation cannot be asked, or is too long.
        """
        try:
            json.dumps(messages, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserInputError("The prompt is not UTF-8 text.", why=str(error), fix="Write it in UTF-8.") from error
        prompt = self.sides[side].format.encode(messages)
        if not prompt.ids or not prompt.text.strip():
            raise UserInputError("The prompt is empty.", fix="Write something to answer.")
        return prompt, room_for(len(prompt.ids), max_new_tokens, self.positions)


@dataclass(frozen=True)
class AnsweringModel:
    """A trained model in memory, with its base, and how both are asked."""

    loaded: LoadedModel
    questions: Questions

    def reply(
        self,
        messages: Sequence[Message],
        side: SideName,
        sampling: Sampling,
        max_new_tokens: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """The answer to a conversation; nothing is computed before it is iterated over.

        Args:
            max_new_tokens: None: DEFAULT_NEW_TOKENS. Fewer where the model's positions do not leave so many.
            stopped: Asked before each token.

        Raises:
            UserInputError: the conversation cannot be asked, or is too long.
        """
        asked = self.questions.sides[side]
        prompt, limit = self.questions.prompt(messages, side, max_new_tokens)
        decoder = Decoder(self.loaded, prompt.ids, sampling, tuned=side == "tuned")
        appends_eos = asked.format.kind != "chat" and self.questions.trained.section.append_eos
        answer = AnswerText(stripped=asked.format.kind != "text", tail=asked.format.tail, tail_ends=not appends_eos)
        fills_model = len(prompt.ids) + limit == self.questions.positions
        return Reply(asked, prompt, limit, decoder, answer, stopped, fills_model)


def room_for(prompt: int, max_new_tokens: int | None, positions: int | None) -> int:
    """How many tokens may be generated: what was asked for, or what the model's positions leave of it.

    Raises:
        UserInputError: they leave nothing.
    """
    most = max_new_tokens or DEFAULT_NEW_TOKENS
    if positions is None:
        return most
    if prompt >= positions:
        raise UserInputError(
            f"The prompt has {prompt:,} tokens, and the model was made for {positions:,}.",
            why="Beyond its positions a model answers with nonsense (max_position_embeddings in its config.json).",
            fix="Shorten the prompt, or start a new conversation.",
        )
    return min(most, positions - prompt)


def prepare_questions(tuned: TunedModel, trained: TrainedFormat) -> Questions:
    """Tokenizers and formats of both sides. Reads no weights.

    Raises:
        UserInputError: a tokenizer or a chat template is missing, or does not fit.
    """
    folder = model_folder(tuned.base)
    tokenizer = load_tuned_tokenizer(tuned, folder)
    ids, ignored = generation_defaults(folder)
    own = tokenizer
    if tuned.peft.get("trainable_token_indices"):
        # The base has no embedding for tokens that were learnt: it is asked in its own, which spells them out.
        own = load_tokenizer(tuned.base.model_copy(update={"new_tokens": []}), folder)
    sides: dict[SideName, Side] = {}
    for name, used in (("base", own), ("tuned", tokenizer)):
        if used.chat_template is None and tokenizer.chat_template is not None:
            used.chat_template = tokenizer.chat_template
        asked = prompt_format(trained, used)
        sides[name] = Side(name, used, asked, _ends(used, asked, ids))  # type: ignore[index, arg-type]
    section = trained.section
    told = bool(asked.end) if asked.kind == "chat" else section.append_eos or bool(asked.tail)
    return Questions(tuned, trained, sides, told, ignored, model_positions(read_config(tuned.base, folder)))


def _ends(tokenizer: PreTrainedTokenizerBase, asked: PromptFormat, defaults: Sequence[int]) -> frozenset[int]:
    """All that says that an answer is over: the tokenizer's, the model's, and what training took for an end."""
    return answer_ends(tokenizer, defaults, [tokenizer.get_vocab().get(asked.end)] if asked.end else [])


def load_answering(questions: Questions, device: torch.device | None = None) -> AnsweringModel:
    """Reads the weights. Raises what `load_tuned` does."""
    loaded = load_tuned(questions.tuned, device, questions.sides["tuned"].tokenizer)
    return AnsweringModel(loaded, questions)


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The conversation with a system prompt at its beginning, in place of one that is there."""
    if system is None:
        return list(messages)
    return [{"role": "system", "content": system}, *(m for m in messages if m["role"] != "system")]


def check_system(questions: Questions, system: str | None) -> None:
    """Raises UserInputError if the model cannot be given this system prompt."""
    if system is not None:
        columns = questions.format.asked
        text = json.dumps(dict.fromkeys(columns, "?")) if len(columns) > 1 else "?"
        questions.prompt(with_system([{"role": "user", "content": text}], system), "tuned", None)


def named_device(name: str | None) -> torch.device | None:
    """Raises UserInputError for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserInputError(
            "--device cuda: there is no GPU that PyTorch can use.",
            fix="Leave it out to use the CPU; see: shardtune doctor",
        )
    return torch.device(name) if name is not None else None
