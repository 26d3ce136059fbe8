"""Which format is this, and how does a row become text with marked spans?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shardtune.config.schema import DataSection
from shardtune.data.template import Template
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FormatName = Literal["text", "prompt", "prompt-completion", "chat"]
LossOn = Literal["assistant", "completion", "all"]

# What `space_before_answer` finds, which stands in the run's events: `inference.prompts` goes by it.
SPACE_JOINED = (
    "the space before the answer is part of the answer's first token, so prompts at inference must end without it"
)
SPACE_APART = "the space before the answer is a separate token, so prompts at inference must end with it"
_TEXT = "text"
_PAIR = ("prompt", "completion")
_CHAT_COLUMNS = ("messages", "conversations")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text.

    Attributes:
        text: All of it.
        spans: Character ranges of `text` that carry loss: sorted, disjoint, half open.
        special: The text already holds its special tokens (chat): the tokenizer adds none, and no end is appended.
        remarks: What the user should know about the row; counted, and reported as findings.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    special: bool = False
    remarks: frozenset[RowRemark] = frozenset()


@dataclass(frozen=True, slots=True)
class RowRemark:
    """Something in a row that does not stop it from being trained on, but that nobody writes on purpose."""

    kind: Literal["empty row", "empty turn", "lost tool calls", "unknown role"]
    detail: str = ""  # the role


class RowProblem(ValueError):
    """A row that cannot be rendered; the message says why."""


@dataclass(frozen=True)
class FormatChoice:
    """What the rows are, in words for the person who reads the log, and the columns that are read."""

    name: FormatName
    why: str
    columns: tuple[str, ...]


def choose_format(section: DataSection, columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> FormatChoice:
    """The format `data.format` names, or the one the columns and a few rows show.

    Args:
        columns: Columns of the split.
        sample: Its first rows; values tell a list of messages from a text.

    Raises:
        UserInputError: no format fits, or the one that was asked for does not.
    """
    asked = section.format
    choice = _detected(section, columns, sample) if asked == "auto" else _asked(section, asked, columns, sample)
    _check_loss(section, choice)
    if choice.name != "chat":
        _require_text(choice, sample)
    return replace(choice, why=choice.why + _unused_fields(section, choice))


def loss_on(section: DataSection, choice: FormatChoice) -> LossOn:
    """`data.train_on` with `auto` resolved."""
    if section.train_on != "auto":
        return section.train_on
    if choice.name == "text":
        return "all"
    return "assistant" if choice.name == "chat" and choice.columns[0] != _PAIR[0] else "completion"


def renderer(
    section: DataSection, choice: FormatChoice, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Mapping[str, Any]], Rendered]:
    """What turns rows of this format into text. Can be pickled; raises RowProblem for a row it cannot render.

    Raises:
        UserInputError: the chat template is missing, broken, or does not show which part the assistant says.
    """
    if choice.name == "chat":
        from shardtune.data.chat import chat_renderer

        return chat_renderer(section, choice, tokenizer)
    if choice.name == "text":
        return TextRenderer(choice.columns[0])
    return PromptRenderer(template_of(section, choice), whole=loss_on(section, choice) == "all")


def template_of(section: DataSection, choice: FormatChoice) -> Template:
    """The template of a row of prompt and answer; two columns of their own are one without anything between them."""
    if choice.name == "prompt" and section.prompt_template is not None:
        return Template.parse(section.prompt_template)
    return Template((("", _PAIR[0]), ("", _PAIR[1])))


def space_before_answer(
    section: DataSection,
    choice: FormatChoice,
    sample: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """What becomes of a space that stands between prompt and answer; empty where there is none, or no token of it."""
    if choice.name not in ("prompt", "prompt-completion"):
        return ""
    template = template_of(section, choice)
    for row in sample:
        cells = {column: row.get(column) for column in template.columns}
        if not all(isinstance(cell, str) and cell.strip() for cell in cells.values()):
            continue
        prompt, answer = template.render(cells)
        if not prompt.endswith((" ", "\t")) or answer[0].isspace():
            return ""
        whole, before, without = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (prompt + answer, prompt, prompt.rstrip(" \t"))
        )
        if whole[: len(before)] != before:
            return SPACE_JOINED
        if before != without:
            return SPACE_APART
        return ""
    return ""


@dataclass(frozen=True)
class TextRenderer:
    """The text of one column, all of it learnt. A row without text becomes empty text."""

    column: str

    def __call__(self, row: Mapping[str, Any]) -> Rendered:
        text = _text(row, self.column) or ""
        return Rendered(text, ((0, len(text)),) if text else ())


@dataclass(frozen=True)
class PromptRenderer:
    """A prompt and its answer; only the answer is learnt unless `whole`. A row without an answer becomes empty text.

    An empty cell of the prompt is an empty text (the optional `input` of instruction sets). Where all is learnt, no
    column is the answer, and a row is empty when all its cells are.
    """

    template: Template
    whole: bool

    def __call__(self, row: Mapping[str, Any]) -> Rendered:
        cells = {column: _text(row, column) or "" for column in self.template.columns}
        learnt = "".join(cells.values()) if self.whole else cells[self.template.answer]
        if not learnt.strip():
            return Rendered("", ())  # its end token alone would teach the model to say nothing
        prompt, answer = self.template.render(cells)
        text = prompt + answer
        return Rendered(text, ((0 if self.whole else len(prompt), len(text)),))


def _text(row: Mapping[str, Any], column: str) -> str | None:
    value = row[column]
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        return None  # how pandas writes an empty cell
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise RowProblem(f"column '{column}' contains a {type(value).__name__}, not text: {str(value)[:80]}")


def _detected(section: DataSection, columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> FormatChoice:
    if section.prompt_template is not None:
        return _asked(section, "prompt", columns, sample)
    if section.messages_field is not None:
        return _asked(section, "chat", columns, sample)
    if section.text_field is not None:
        return _asked(section, "text", columns, sample)
    fitting = _fitting(columns, sample)
    if fitting:
        choice = _asked(section, fitting[0], columns, sample)
        return replace(choice, why=choice.why + _not_read(fitting[1:]))
    if any(name in columns for name in _CHAT_COLUMNS):
        return _asked(section, "chat", columns, sample)  # which says what is wrong with it
    raise UserInputError(
        "Cannot detect the data format.",
        why="None of these was found: a column of messages ('messages' or 'conversations'), the columns 'prompt' and "
        f"'completion', a column '{_TEXT}'. The columns are: {_listed(columns)}.",
        fix=f"Set what to train on: {_suggestion(columns)}, data.text_field, or data.messages_field.",
    )


def _fitting(columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> list[FormatName]:
    """Every format that the columns could be; the one that says most about a row first."""
    found: list[FormatName] = []
    if any(name in columns and _holds_messages(name, sample) for name in _CHAT_COLUMNS):
        found.append("chat")
    if all(name in columns for name in _PAIR):
        found.append("chat" if all(_holds_messages(name, sample) for name in _PAIR) else "prompt-completion")
    if _TEXT in columns:
        found.append("text")
    return list(dict.fromkeys(found))


def _not_read(others: Sequence[FormatName]) -> str:
    """Which columns could have been trained on instead, and the setting for it."""
    named = {"text": repr(_TEXT), "prompt-completion": " and ".join(map(repr, _PAIR))}
    return "".join(
        f"; not read: {named[other]} (set data.format: {other} to train on that instead)"
        for other in others
        if other in named
    )


def _unused_fields(section: DataSection, choice: FormatChoice) -> str:
    """Columns that a setting names and this format does not read."""
    named: dict[FormatName, tuple[str, str | None]] = {
        "text": ("data.text_field", section.text_field),
        "chat": ("data.messages_field", section.messages_field),
    }
    return "".join(
        f"; not read: '{column}', which {key} names (set data.format: {name} to train on that instead)"
        for name, (key, column) in named.items()
        if column is not None and name != choice.name
    )


def _asked(
    section: DataSection, name: FormatName, columns: Sequence[str], sample: Sequence[Mapping[str, Any]]
) -> FormatChoice:
    if section.prompt_template is not None and name != "prompt":
        raise UserInputError(
            f"data.format is {name}, but data.prompt_template is set.",
            why="It applies to data.format: prompt only; here it would have no effect.",
            fix="Remove one of the two.",
        )
    if name == "text":
        column = section.text_field or _TEXT
        if section.text_field is None and column not in columns:
            raise _no_text_column(columns, sample)
        _require_columns([column], columns, "data.text_field")
        return FormatChoice("text", f"column '{column}'", (column,))
    if name == "prompt":
        if section.prompt_template is None:
            raise UserInputError(
                "data.format is prompt, but data.prompt_template is not set.", fix=f"Set {_suggestion(columns)}."
            )
        needed = Template.parse(section.prompt_template).columns
        _require_columns(needed, columns, "data.prompt_template")
        return FormatChoice("prompt", f"data.prompt_template, the answer is '{needed[-1]}'", tuple(needed))
    if name == "prompt-completion":
        _require_columns(_PAIR, columns, "data.format: prompt-completion")
        if all(_holds_messages(column, sample) for column in _PAIR):
            return _pair_of_messages(columns)
        return FormatChoice("prompt-completion", "columns 'prompt' and 'completion'", _PAIR)
    return _chat_choice(section, columns, sample)


def _no_text_column(columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> UserInputError:
    messages = next((column for column in columns if _holds_messages(column, sample)), None)
    return UserInputError(
        f"data.format is text, but the data has no column '{_TEXT}'.",
        why=f"Its columns are: {_listed(columns)}.",
        fix=f"The column '{messages}' contains messages: set data.format: chat and data.messages_field: {messages}."
        if messages
        else "Set data.text_field to the column with the text.",
    )


def _chat_choice(section: DataSection, columns: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> FormatChoice:
    column = section.messages_field
    if column is None:
        column = next((name for name in _CHAT_COLUMNS if name in columns), None)
        if column is None and all(name in columns and _holds_messages(name, sample) for name in _PAIR):
            return _pair_of_messages(columns)
    if column is None:
        raise UserInputError(
            "data.format is chat, but no column of messages was found.",
            why=f"Looked for 'messages' and 'conversations'. The columns are: {_listed(columns)}.",
            fix="Set data.format: prompt-completion for the texts in 'prompt' and 'completion'."
            if all(name in columns for name in _PAIR)
            else "Set data.messages_field to the column with the messages.",
        )
    _require_columns([column], columns, "data.messages_field")
    value = _first(column, sample)
    if value is not None and not _holds_messages(column, sample):
        raise UserInputError(
            f"The column '{column}' does not contain messages.",
            why=f"The first is a {type(value).__name__}: {str(value)[:80]}",
            fix='Each row must be a list such as [{"role": "user", "content": "…"}, {"role": "assistant", …}] '
            '(or "from" and "value"); set data.messages_field or data.format.',
        )
    sharegpt = _is_sharegpt(value)
    extra = [name for name in (*(["system"] if sharegpt else []), "tools") if name in columns]
    why = f"column '{column}' contains messages in {'ShareGPT' if sharegpt else 'OpenAI'} format"
    return FormatChoice("chat", why + _with_extra(extra), (column, *extra))


def _pair_of_messages(columns: Sequence[str]) -> FormatChoice:
    extra = [name for name in ("tools",) if name in columns]
    why = "columns 'prompt' and 'completion' contain messages"
    return FormatChoice("chat", why + _with_extra(extra), (*_PAIR, *extra))


def _with_extra(extra: Sequence[str]) -> str:
    return f", with {' and '.join(repr(name) for name in extra)}" if extra else ""


def _check_loss(section: DataSection, choice: FormatChoice) -> None:
    pair = choice.name == "chat" and choice.columns[0] == _PAIR[0]
    fits = {
        "text": ("auto", "all"),
        "prompt": ("auto", "completion", "all"),
        "prompt-completion": ("auto", "completion", "all"),
        "chat": ("auto", "assistant", "completion", "all") if pair else ("auto", "assistant", "all"),
    }[choice.name]
    if section.train_on not in fits:
        raise UserInputError(
            f"data.train_on: {section.train_on} does not apply to the data format {choice.name}.",
            why=f"The format was chosen by: {choice.why}.",
            fix=f"Set data.train_on to {' or '.join(fits)}, or data.format to the format of the rows.",
        )


def _require_columns(needed: Sequence[str], columns: Sequence[str], key: str) -> None:
    missing = [repr(column) for column in needed if column not in columns]
    if missing:
        raise UserInputError(
            f"The data lacks the {'columns' if missing[1:] else 'column'} {_and(missing)}, which {key} names.",
            why=f"Its columns are: {_listed(columns)}.",
            fix=f"Set {key.split(':')[0]} to match the data.",
        )


def _require_text(choice: FormatChoice, sample: Sequence[Mapping[str, Any]]) -> None:
    """A list of messages or a date would be trained on as Python prints it."""
    for column in choice.columns:
        value = _first(column, sample)
        if value is None or isinstance(value, str | int | float):
            continue
        date = hasattr(value, "isoformat")
        messages = _holds_messages(column, sample)
        raise UserInputError(
            f"The column '{column}' contains values of type {type(value).__name__}, not text.",
            why=f"The first is {str(value)[:80]}."
            + (" A JSON column whose strings all look like dates is read as dates." if date else ""),
            fix="Store the text in a column of strings (parquet and csv keep dates as written)."
            if date
            else f"These are messages: set data.format: chat and data.messages_field: {column}."
            if messages
            else "Set a column of strings in data.text_field or data.prompt_template.",
        )


def _first(column: str, sample: Sequence[Mapping[str, Any]]) -> Any:
    return next((row[column] for row in sample if row.get(column) is not None), None)


def _holds_messages(column: str, sample: Sequence[Mapping[str, Any]]) -> bool:
    from shardtune.data.messages import looks_like_messages  # which needs RowProblem from here

    return any(looks_like_messages(row[column]) for row in sample if row.get(column) is not None)


def _is_sharegpt(value: Any) -> bool:
    first = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and value else None
    if isinstance(value, str):
        return '"from"' in value and '"role"' not in value
    return isinstance(first, Mapping) and first.get("from") is not None


def _suggestion(columns: Sequence[str]) -> str:
    """A template out of the columns that are there, where they are called as most sets call them."""
    asked = next((c for c in ("instruction", "question", "input", "query", "prompt") if c in columns), None)
    answer = next((c for c in ("response", "output", "answer", "completion", "target") if c in columns), None)
    example = f"{{{asked}}}\\n\\n{{{answer}}}" if asked and answer else "{question}\\n\\n{answer}"
    return f'data.prompt_template (such as "{example}")'


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"
