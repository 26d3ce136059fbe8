"""What does the model see, and what does it learn? Rows decoded token by token, with the supervised ones marked."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from shardtune.data.tokens import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardtune.data.prepared import Prepared

TOKENS_SHOWN = 2000  # of a longer row, the beginning and the end
_BYTES_OF_A_CHARACTER = 4  # so many tokens may make one character of UTF-8
_MARKS = "⟦⟧⟨⟩⏎⇥"
_JOINERS = "\u200c\u200d"  # invisible, but part of emoji and of many scripts
LEGEND_PLAIN = "⟦…⟧ supervised (carries loss)   ⟨…⟩ special token   ⏎ newline   ⇥ tab"
_LEGEND_COLOUR = (
    ("supervised (carries loss)", "green underline"),
    ("not supervised", "dim"),
    ("special token", "bold magenta"),
    ("⏎ newline   ⇥ tab", "dim"),
)


@dataclass(frozen=True)
class Piece:
    """What one token shows; where several make one character, what they show together."""

    text: str
    ids: tuple[int, ...]
    supervised: bool
    named: bool = False  # a special token, or one that decodes to nothing: `text` is its name


@dataclass(frozen=True)
class ShownRow:
    """A row as pieces. Of a long one the middle is left out, between `head` and `tail`."""

    number: int
    tokens: int
    supervised: int
    head: tuple[Piece, ...]
    tail: tuple[Piece, ...] = ()
    left_out: int = 0
    left_out_supervised: int = 0

    @property
    def title(self) -> str:
        share = f" ({self.supervised / self.tokens:.0%})" if self.tokens else ""
        return f"row {self.number:,}: {self.tokens:,} tokens, {self.supervised:,} supervised{share}"

    @property
    def gap(self) -> str:
        return f"… {self.left_out:,} tokens not shown, {self.left_out_supervised:,} of them supervised …"


def evenly_spaced(rows: int, count: int) -> list[int]:
    """`count` row numbers at equal distances, the first row among them; the same ones every time."""
    count = min(rows, count)
    return [index * rows // count for index in range(count)]


def show_rows(
    prepared: Prepared, count: int, tokenizer: PreTrainedTokenizerBase, *, limit: int = TOKENS_SHOWN
) -> list[ShownRow]:
    """`count` rows, spread over the set."""
    return [show_row(prepared, number, tokenizer, limit=limit) for number in evenly_spaced(len(prepared), count)]


def show_row(
    prepared: Prepared, number: int, tokenizer: PreTrainedTokenizerBase, *, limit: int = TOKENS_SHOWN
) -> ShownRow:
    ids, labels = (array.tolist() for array in prepared.row(number))
    # The first token is never predicted, so its label counts for nothing.
    learnt = [False, *(label != IGNORED for label in labels[1:])]
    head = len(ids) if len(ids) <= limit else limit * 3 // 4
    tail = max(head, len(ids) - (limit - head))
    return ShownRow(
        number=number,
        tokens=len(ids),
        supervised=sum(learnt),
        head=tuple(pieces(ids[:head], learnt[:head], tokenizer)),
        tail=tuple(pieces(ids[tail:], learnt[tail:], tokenizer)),
        left_out=tail - head,
        left_out_supervised=sum(learnt[head:tail]),
    )


def pieces(ids: Sequence[int], learnt: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Token by token what it adds to the text.

    A token is decoded behind the one before it (alone, many tokenizers lose its leading space), and one that ends
    inside a character waits for those that complete it, unless they are masked differently.
    """
    special = special_ids(tokenizer)
    context, read = 0, 0  # ids[context:read] was shown last
    for end in range(1, len(ids) + 1):
        newest, is_last = ids[end - 1], end == len(ids)
        if newest not in special:
            text = _added(tokenizer, ids, context, read, end)
            unfinished = text.endswith("\ufffd") and end - read < _BYTES_OF_A_CHARACTER
            if unfinished and not is_last and ids[end] not in special and learnt[end] == learnt[end - 1]:
                continue
        else:
            text = ""
        shown = tuple(ids[read:end])
        name = text or " ".join(_name(tokenizer, token) for token in shown)
        yield Piece(name, shown, learnt[end - 1], named=not text)
        context, read = read, end


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Also those no role names, such as a template's `<|im_start|>`."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def _added(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], context: int, read: int, end: int) -> str:
    before, both = _decode(tokenizer, ids[context:read]), _decode(tokenizer, ids[context:end])
    # A character broken off before this token decodes differently with it.
    whole = both.startswith(before) and not before.endswith("\ufffd")
    return both[len(before) :] if whole else _decode(tokenizer, ids[read:end])


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    if token >= len(tokenizer):
        return f"id {token}"
    return str(tokenizer.convert_ids_to_tokens([token])[0] or f"id {token}")


def visible(text: str) -> str:
    """Text that cannot act on a terminal or a page: a newline is ⏎ and a break, control characters are written out.

    Example:
        >>> visible("a\\x1b[2J")
        'a\\\\x1b[2J'
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return "⏎\n" if character == "\n" else "⇥"
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    if character in _MARKS or (unicodedata.category(character) in _UNSEEN and character not in _JOINERS):
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


_UNSEEN = ("Cf", "Cs", "Zl", "Zp")  # direction overrides, zero-width spaces, lone surrogates, separators


def beginning(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, characters: int = 80) -> str:
    """The first characters of a row on one line, without its special tokens."""
    shown = pieces(ids[:characters], [False] * min(len(ids), characters), tokenizer)
    text = "".join(visible(piece.text) for piece in shown if not piece.named)
    line = " ".join(text.replace("⏎\n", "⏎ ").split())
    return line[: characters - 1] + "…" if len(line) > characters else line


def as_text(row: ShownRow, *, colour: bool) -> Text:
    """The row for a terminal; without colour, brackets say the same."""
    text = Text(no_wrap=False)
    for part in (row.head, row.tail):
        (_add_coloured if colour else _add_plain)(text, part)
        if row.left_out and part is row.head:
            text.append(f"\n{row.gap}\n", style="yellow" if colour else "")
    if text.plain.endswith("\n"):
        text.right_crop(1)  # printing ends the line
    return text


def _add_plain(text: Text, part: tuple[Piece, ...]) -> None:
    inside = False
    for piece in part:
        if piece.supervised != inside:
            text.append("⟦" if piece.supervised else "⟧")
            inside = piece.supervised
        text.append(f"⟨{visible(piece.text)}⟩" if piece.named else visible(piece.text))
    text.append("⟧" if inside else "")


def _add_coloured(text: Text, part: tuple[Piece, ...]) -> None:
    # Neighbours alternate between two shades, so that a token's bounds are seen.
    for index, piece in enumerate(part):
        if piece.named:
            style = "bold magenta underline" if piece.supervised else "magenta"
        elif piece.supervised:
            style = "green underline" if index % 2 else "bright_green underline"
        else:
            style = "dim" if index % 2 else ""
        text.append(visible(piece.text), style=style)


def legend(*, colour: bool) -> Text:
    if not colour:
        return Text(LEGEND_PLAIN)
    text = Text()
    for index, (words, style) in enumerate(_LEGEND_COLOUR):
        text.append("   " if index else "")
        text.append(words, style=style)
    return text
