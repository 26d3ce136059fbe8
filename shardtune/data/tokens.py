"""Which tokens carry loss? Rendered rows become token ids and labels; nothing is cut or left out here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtune.config.schema import DataSection
from shardtune.data.byte_level import ByteEnds, byte_positions
from shardtune.data.formats import FormatChoice, Rendered, loss_on
from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that carries no loss, as in torch's cross entropy


@dataclass(slots=True)
class Encoded:
    """A row as tokens. Labels are not shifted: `labels[i]` is `ids[i]`, or IGNORED where no loss is taken."""

    ids: list[int]
    labels: list[int]


class Encoder:
    """Turns rendered rows into tokens. Can be pickled, so that worker processes can hold one each.

    A token carries loss when its characters end inside a span: one that straddles the start of an answer is learnt.
    Masks go by position, never by the value of a token, so a pad token that is also the end token does no harm.

    Args:
        section: Says whether an end is appended.
        tokenizer: A fast one where only a part of a row is learnt.
        choice: The format of the rows.

    Raises:
        UserInputError: the tokenizer cannot do what is asked for.
    """

    def __init__(self, section: DataSection, tokenizer: PreTrainedTokenizerBase, choice: FormatChoice) -> None:
        self.tokenizer = tokenizer
        self.append_eos = section.append_eos
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        loss = loss_on(section, choice)
        self.masks = loss != "all"
        self.byte_ends = ByteEnds.of(tokenizer) if self.masks and choice.name == "chat" else None
        if self.masks and not tokenizer.is_fast:
            part = "the assistant's turns" if choice.name == "chat" else "the answer"
            raise UserInputError(
                f"With this tokenizer, the tokens of {part} cannot be determined.",
                why=f"{type(tokenizer).__name__} does not report the characters of each token (offsets).",
                fix="Use a folder with tokenizer.json (model.tokenizer_name_or_path), or set data.train_on: all.",
            )
        if choice.name != "chat" and self.append_eos and self.eos is None:
            raise UserInputError(
                "data.append_eos is true, but the tokenizer has no end-of-sequence token.",
                why="The model would never learn to stop.",
                fix="Set eos_token in its tokenizer_config.json, or data.append_eos: false.",
            )

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokens of each row, in order. A blank row gives none, however many tokens a blank has."""
        rows = [Encoded([], []) for _ in rendered]
        for special in (False, True):
            numbers = [n for n, row in enumerate(rendered) if row.special == special and row.text.strip()]
            if special and self.byte_ends is not None and numbers:
                numbers = self._encode_fast(rendered, numbers, rows)
            if not numbers:
                continue
            tokens = self.tokenizer(
                [rendered[n].text for n in numbers],
                add_special_tokens=not special,
                return_offsets_mapping=self.masks,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # rows are cut later: a warning about their length means nothing yet
            )
            offsets = tokens["offset_mapping"] if self.masks else [None] * len(numbers)
            for n, ids, places in zip(numbers, tokens["input_ids"], offsets, strict=True):
                rows[n] = self._row(rendered[n], ids, places)
        return rows

    def _encode_fast(self, rendered: Sequence[Rendered], numbers: list[int], rows: list[Encoded]) -> list[int]:
        """Fill what byte ends can tell; returns the numbers of the rows that need the tokenizer's own offsets."""
        assert self.byte_ends is not None
        left = []
        texts = [rendered[n].text for n in numbers]
        for n, (ids, ends) in zip(numbers, self.byte_ends.encode(texts), strict=True):
            if ends is None:
                left.append(n)
                continue
            row = rendered[n]
            spans = [tuple(byte_positions(row.text, span)) for span in row.spans]
            rows[n] = self._finished(row, ids, _labels(ids, ends, spans))  # type: ignore[arg-type]
        return left

    def _row(self, row: Rendered, ids: list[int], places: Any) -> Encoded:
        labels = list(ids) if places is None else _labels(ids, [end for _, end in places], row.spans)
        return self._finished(row, ids, labels)

    def _finished(self, row: Rendered, ids: list[int], labels: list[int]) -> Encoded:
        if self.bos is not None and ids[:2] == [self.bos, self.bos]:  # the text has it and the tokenizer added it
            ids, labels = ids[1:], labels[1:]
        if ids[:1] == [self.bos]:
            labels[0] = IGNORED  # nothing stands before it that could predict it
        if self.append_eos and not row.special:
            # Some tokenizers add it themselves, at no place in the text: it is to be learnt all the same, and once.
            seen = len(ids)
            while seen and ids[seen - 1] == self.eos:
                seen -= 1
            ids, labels = [*ids[:seen], self.eos], [*labels[:seen], self.eos]
        return Encoded(ids, labels)


def _labels(ids: list[int], ends: list[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    labels = [IGNORED] * len(ids)
    text_end = len(ids)
    while text_end and ends[text_end - 1] == 0:  # added behind the text by the tokenizer: no place in it
        text_end -= 1
    for start, end in spans:
        first = bisect_right(ends, start, 0, text_end)
        last = bisect_right(ends, end, first, text_end)
        labels[first:last] = ids[first:last]
    return labels
