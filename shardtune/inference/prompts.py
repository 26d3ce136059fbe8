"""What does a question become? The tokens that training would have had before the answer, by the format of its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from shardtune.config.schema import DataSection
from shardtune.data.chat import ChatRenderer, chat_renderer
from shardtune.data.formats import SPACE_APART, FormatChoice, PromptRenderer, Rendered, RowProblem, template_of
from shardtune.data.messages import Message, read_conversation
from shardtune.data.template import Template
from shardtune.data.tokens import IGNORED, Encoder
from shardtune.errors import UserInputError
from shardtune.inference.trained_format import TrainedFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "system"
Kind = Literal["chat", "template", "text"]
_MARK = "\ue000system\ue001"
_ANSWER = "the"  # a word that every tokenizer joins with a space before it, as it would that of a real answer


@dataclass(frozen=True)
class Prompt:
    """What the model reads before it answers."""

    text: str
    ids: list[int]


class PromptFormat(Protocol):
    """A format of training rows, with the answer left open."""

    @property
    def kind(self) -> Kind: ...

    @property
    def description(self) -> str:
        """For people: what is done with what they type."""

    @property
    def has_turns(self) -> bool:
        """A conversation can go on; otherwise each question stands alone."""

    @property
    def asked(self) -> tuple[str, ...]:
        """Columns that a question fills; more than one: it is a JSON object with them."""

    @property
    def tail(self) -> str:
        """What training has behind every answer, besides the end-of-sequence token."""

    @property
    def channel(self) -> str:
        """Special tokens behind which an answer's text stands, after reasoning (gpt-oss); empty: it has none."""

    @property
    def end(self) -> str:
        """The token that ends an answer by the format itself; empty: none."""

    @property
    def default_system(self) -> str:
        """The system prompt that the format writes itself where a conversation has none."""

    def encode(self, messages: Sequence[Message]) -> Prompt:
        """The prompt for a conversation that ends with a question; where there are no turns, it is that question alone.

        Raises:
            UserInputError: the format has no place for something in it.
        """

    def messages_of(self, row: Mapping[str, Any]) -> list[Message]:
        """The conversation that a row of data stands for, without its answer.

        Raises:
            UserInputError: it lacks something.
        """


def prompt_format(trained: TrainedFormat, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    """The format for a tokenizer (that of the base may be another one than the tuned model's).

    Raises:
        UserInputError: there is no chat template, or it does not show how an answer begins.
    """
    section, choice = trained.section, trained.choice
    if choice.name == "text":
        return TextFormat(choice, _encoder(section, tokenizer, choice))
    if choice.name == "chat":
        return _chat_format(trained, tokenizer)
    return TemplateFormat(template_of(section, choice), choice, _encoder(section, tokenizer, choice))


@dataclass(frozen=True)
class TextFormat:
    """A text to be continued."""

    choice: FormatChoice
    encoder: Encoder
    kind: ClassVar[Kind] = "text"
    has_turns: ClassVar[bool] = False
    asked: ClassVar[tuple[str, ...]] = ()
    tail: ClassVar[str] = ""
    channel: ClassVar[str] = ""
    end: ClassVar[str] = ""
    default_system: ClassVar[str] = ""

    @property
    def description(self) -> str:
        if self.choice.why == "--raw":
            return "the prompt is a text to continue (--raw)"
        return f"the prompt is a text to continue, as in training ({self.choice.why.partition(';')[0]})"

    def encode(self, messages: Sequence[Message]) -> Prompt:
        raw = self.choice.why == "--raw"
        what = "--raw continues the prompt as it is" if raw else "This model continues texts"
        asked = _only_question(messages, what, has_system=False)
        return Prompt(asked, _tokens(self.encoder, asked, special=False))

    def messages_of(self, row: Mapping[str, Any]) -> list[Message]:
        names = dict.fromkeys((*self.choice.columns, "prompt", "text"))
        found = next((row[name] for name in names if isinstance(row.get(name), str)), None)
        if found is None:
            raise _lacks(row, " or ".join(f"'{name}'" for name in names))
        return _question(found)


@dataclass(frozen=True)
class TemplateFormat:
    """`data.prompt_template` (or the columns prompt and completion) up to the answer."""

    template: Template
    choice: FormatChoice
    encoder: Encoder
    kind: ClassVar[Kind] = "template"
    has_turns: ClassVar[bool] = False
    channel: ClassVar[str] = ""
    end: ClassVar[str] = ""
    default_system: ClassVar[str] = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the prompt."""
        return tuple(name for name in self.template.columns if name != self.template.answer)

    @property
    def asked(self) -> tuple[str, ...]:
        """Those that a question fills; a column `system` is that of the system prompt, where there are others."""
        return tuple(name for name in self.columns if name != SYSTEM) or self.columns

    @property
    def tail(self) -> str:
        return self.template.tail

    @property
    def description(self) -> str:
        if self.choice.name == "prompt-completion":
            return "the prompt as it is, as in training (columns 'prompt' and 'completion')"
        written = "".join(
            literal + (f"{{{name}}}" if name is not None else "") for literal, name in self.template.parts
        )
        shown = json.dumps(written, ensure_ascii=False)
        what = (
            f"the prompt is {{{self.asked[0]}}}"
            if len(self.asked) == 1
            else f"the prompt is a JSON object with {', '.join(self.asked)}"
        )
        return f"data.prompt_template of the run, {shown}; {what}; the answer is {{{self.template.answer}}}"

    def encode(self, messages: Sequence[Message]) -> Prompt:
        takes_system = SYSTEM in self.columns and SYSTEM not in self.asked
        asked = _only_question(messages, "This model was trained on single questions", has_system=takes_system)
        cells = self._cells(asked)
        if takes_system:
            cells[SYSTEM] = messages[0]["content"] if messages[0]["role"] == SYSTEM else ""
        rendered = PromptRenderer(self.template, whole=False)({**cells, self.template.answer: _ANSWER})
        text = rendered.text[: rendered.spans[0][0]]
        if SPACE_APART in self.choice.why:
            return Prompt(text, _tokens(self.encoder, text, special=False))
        return _up_to_answer(self.encoder, text, special=False)

    def _cells(self, asked: str) -> dict[str, Any]:
        if not self.asked:
            raise UserInputError(
                "data.prompt_template of the run has no column before its answer: there is nothing to ask.",
                fix="Use --raw, which continues the prompt as it is.",
            )
        if len(self.asked) == 1:
            return {self.asked[0]: asked}
        try:
            cells = json.loads(asked)
        except ValueError:
            cells = None
        if not isinstance(cells, dict) or set(cells) != set(self.asked):
            example = json.dumps(dict.fromkeys(self.asked, "…"), ensure_ascii=False)
            why = f"data.prompt_template of the run has several before the answer: {', '.join(self.asked)}."
            if isinstance(cells, dict):
                missing, unknown = set(self.asked) - set(cells), set(cells) - set(self.asked)
                parts = [f"lacks {', '.join(sorted(missing))}"] if missing else []
                parts += [f"has {', '.join(sorted(map(str, unknown)))}, which the template does not"] if unknown else []
                why += f" The object {' and '.join(parts)}."
            raise UserInputError(
                "The prompt does not say what belongs in which column.",
                why=why,
                fix=f"Give a JSON object: '{example}' (an empty text where there is nothing to say).",
            )
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in cells.items()}

    def messages_of(self, row: Mapping[str, Any]) -> list[Message]:
        if "prompt" not in self.asked and set(row) == {"prompt"}:
            return _question(row["prompt"])
        missing = [name for name in self.asked if name not in row]
        if missing:
            raise _lacks(row, ", ".join(f"'{name}'" for name in missing))
        cells = {name: "" if row[name] is None else row[name] for name in self.asked}
        alone = next(iter(cells.values())) if len(cells) == 1 else json.dumps(cells, ensure_ascii=False)
        system = row.get(SYSTEM) if SYSTEM in self.columns and SYSTEM not in self.asked else None
        return [*([{"role": SYSTEM, "content": str(system)}] if system else []), *_question(alone)]


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of training, up to where the assistant speaks."""

    renderer: ChatRenderer
    choice: FormatChoice
    encoder: Encoder
    known: bool
    kind: ClassVar[Kind] = "chat"
    has_turns: ClassVar[bool] = True
    asked: ClassVar[tuple[str, ...]] = ()

    @property
    def default_system(self) -> str:
        question: Message = {"role": "user", "content": "?"}
        try:
            given, alone = self._render([{"role": SYSTEM, "content": _MARK}, question]), self._render([question])
        except RowProblem:
            return ""
        before, mark, behind = given.partition(_MARK)
        if not mark or not alone.startswith(before) or not alone[len(before) :].endswith(behind):
            return ""
        return alone[len(before) : len(alone) - len(behind)].strip()

    @cached_property
    def channel(self) -> str:
        short = self.renderer.finder.skeleton_of_roles(["user", "assistant"], None)
        lead = short.slots[-1].before[-short.slots[-1].lead :] if short is not None and short.slots[-1].lead else ""
        special = (str(token) for token in self.encoder.tokenizer.added_tokens_decoder.values() if token.special)
        return lead if any(token in lead for token in special) else ""

    @property
    def end(self) -> str:
        return self.renderer.finder.end_of_chat.strip()

    @property
    def tail(self) -> str:
        """An end of turn that is no token: the model has learnt to spell it out."""
        return "" if self.end in self.encoder.tokenizer.get_vocab() else self.end

    @property
    def description(self) -> str:
        name = self.renderer.template.name
        return f"{name}, as in training" if self.known else f"{name}; {self.choice.why}"

    def encode(self, messages: Sequence[Message]) -> Prompt:
        if self.channel:  # answers of before stand there with their reasoning, and the template writes the tokens
            messages = [
                {**one, "content": one["content"].rpartition(self.channel)[2]}
                if one["role"] == "assistant" and isinstance(one["content"], str)  # of a tool call there may be none
                else one
                for one in messages
            ]
        try:
            self.renderer.refuse_boundaries(messages)
            text = self._render(messages)
            if messages[0]["role"] == SYSTEM:
                self._refuse_lost_system(messages)
        except RowProblem as problem:
            raise UserInputError(
                "The chat template cannot render this conversation.",
                why=str(problem),
                fix="Leave out --system if it is the system prompt that it does not know."
                if messages[0]["role"] == SYSTEM
                else "Change the message.",
            ) from problem
        return _up_to_answer(self.encoder, text, special=True)

    def _render(self, messages: Sequence[Message]) -> str:
        finder = self.renderer.finder
        text = self.renderer.template.render(messages, None, prompt=finder.prompts)
        return text if finder.prompts else text + finder.opening

    def _refuse_lost_system(self, messages: Sequence[Message]) -> None:
        if _MARK not in self._render([{"role": SYSTEM, "content": _MARK}, *messages[1:]]):
            raise RowProblem(f"{self.renderer.template.name} leaves the system prompt out")

    def messages_of(self, row: Mapping[str, Any]) -> list[Message]:
        """Up to the last message that is not the assistant's."""
        if isinstance(row.get("prompt"), str):
            return _question(row["prompt"])
        names = dict.fromkeys((*self.choice.columns[:1], "messages", "conversations"))
        name = next((name for name in names if row.get(name)), None)
        if name is None and "prompt" in row:
            return _question(row["prompt"])
        if name is None:
            raise _lacks(row, f"'{next(iter(names))}' (or 'prompt')")
        try:
            system = row.get(SYSTEM) if SYSTEM in self.choice.columns else None
            said = read_conversation(row[name], system=system).messages
        except RowProblem as problem:
            raise UserInputError(f"A row of the prompt file is not a conversation: {problem}.") from problem
        while said and said[-1]["role"] == "assistant":
            said = said[:-1]
        if not said:
            raise UserInputError("A conversation of the prompt file asks nothing: only the assistant speaks in it.")
        return said


def _chat_format(trained: TrainedFormat, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    section, choice = trained.section, trained.choice
    if not trained.known:
        if section.chat_template is None and not tokenizer.chat_template:
            raise UserInputError(
                "It is not known how to ask this model: its tokenizer has no chat template.",
                why=f"{choice.why[0].upper()}{choice.why[1:]}.",
                fix="Use --raw, which continues the prompt as it is: write it as the training data were written.",
            )
        section = section.model_copy(update={"train_on": "all"})  # nothing is learnt here: any template will do
    return ChatFormat(
        chat_renderer(section, choice, tokenizer), choice, _encoder(section, tokenizer, choice), trained.known
    )


def _encoder(section: DataSection, tokenizer: PreTrainedTokenizerBase, choice: FormatChoice) -> Encoder:
    """The one of training, which appends no end here, and tells where the answer begins if the tokenizer can."""
    answer = "assistant" if choice.name == "chat" else "completion"
    learnt = answer if tokenizer.is_fast and choice.name != "text" else "all"
    return Encoder(section.model_copy(update={"append_eos": False, "train_on": learnt}), tokenizer, choice)


def _up_to_answer(encoder: Encoder, text: str, *, special: bool) -> Prompt:
    """The tokens that training has before an answer to `text`.

    They are not those of the text alone where its end is joined with the answer: a space may be part of the answer's
    first token, and of two line breaks GPT-2's tokenizer makes one token at the end of a text, and two before a word.
    (Which answers there were is not known here. Where training saw that a space stands alone, its record says so.)

    Args:
        special: The text has its special tokens already.
    """
    alone = Prompt(text, _tokens(encoder, text, special=special))
    if not encoder.masks:
        return alone
    whole = text + _ANSWER
    encoded = encoder.encode([Rendered(whole, ((len(text), len(whole)),), special=special)])[0]
    first = next(i for i, label in enumerate(encoded.labels) if label != IGNORED)
    places = encoder.tokenizer(whole, add_special_tokens=not special, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in places["offset_mapping"]]
    # Counted from the end: at the beginning the encoder may have left out a second begin token.
    last = len(ends) - (len(encoded.ids) - first) - 1
    covered = ends[last] if last >= 0 else 0
    if text[covered:].strip():
        return alone  # joined with a word, which depends on the answer, and that is not known
    return Prompt(text[:covered], encoded.ids[:first])


def _tokens(encoder: Encoder, text: str, *, special: bool) -> list[int]:
    """Of a text that goes on: without the end token that some tokenizers add."""
    ids = encoder.encode([Rendered(text, ((0, len(text)),), special=special)])[0].ids
    if not special and encoder.eos is not None and encoder.eos != encoder.bos:
        while ids and ids[-1] == encoder.eos and not text.endswith(str(encoder.tokenizer.eos_token)):
            ids = ids[:-1]
    return ids


def _question(text: Any) -> list[Message]:
    if not isinstance(text, str):
        raise UserInputError(f"A prompt of the prompt file is a {type(text).__name__}, not a text.")
    return [{"role": "user", "content": text}]


def _only_question(messages: Sequence[Message], what: str, *, has_system: bool) -> str:
    if messages[0]["role"] == SYSTEM and not has_system:
        raise UserInputError(
            "There is no place for a system prompt.",
            why=f"{what}.",
            fix="Leave out --system.",
        )
    others = [message for message in messages if message["role"] != SYSTEM]
    if len(others) != 1:
        raise UserInputError(f"{what}: it knows no conversation.", fix="Ask one question at a time.")
    return str(others[0]["content"])


def _lacks(row: Mapping[str, Any], what: str) -> UserInputError:
    return UserInputError(
        f"A row of the prompt file has no column {what}.", why=f"Its columns are: {', '.join(row) or 'none'}."
    )
