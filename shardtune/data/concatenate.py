"""When and how do the rows of a corpus become stretches of equal length?

A corpus of lines (WikiText, any .txt) is one text per file or split: its lines are joined, blank ones left out, and an
end token stands only where a file ends. Where rows are whole documents, one stands behind each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from shardtune.errors import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardtune.config.schema import DataSection
    from shardtune.data.formats import FormatChoice

Concatenation = Literal["no", "lines", "documents"]
_PIECE = 4096  # characters tokenised at once: some tokenizers mark the start of every text they are given


def choose_concatenation(
    section: DataSection, choice: FormatChoice, texts: Sequence[str], *, from_text_file: bool
) -> Concatenation:
    """How rows are joined, by `data.concatenate` and a sample of their texts.

    `auto` joins what is a line of a text rather than a text: rows of a .txt file, or single lines of which most still
    end with their line break, as WikiText's do. (A .jsonl of one-line rows is as likely a set of short documents that
    each want their end, and its blank rows are rows that lack their text.) Where joining is asked for, a fifth of
    blank rows is enough to see lines in them.

    Raises:
        UserInputError: rows of another format were to be joined.
    """
    if choice.name != "text":
        if section.concatenate is True:
            raise UserInputError(
                f"data.concatenate is true, but the data format is {choice.name}.",
                why=f"Only plain text can be concatenated and cut anywhere. The format was chosen by: {choice.why}.",
                fix="Set data.concatenate: auto, or data.format: text.",
            )
        return "no"
    single = [text for text in texts if "\n" not in text.removesuffix("\n")]
    lines = 2 * len(single) > len(texts)
    blank = sum(not text.strip() for text in texts)
    broken = sum(text.endswith("\n") for text in texts if text.strip())
    torn = from_text_file or 2 * broken > len(texts) - blank
    if section.concatenate is True:
        return "lines" if lines and (torn or 5 * blank > len(texts)) else "documents"
    return "lines" if section.concatenate == "auto" and lines and torn else "no"


def concatenation_note(joining: Concatenation) -> str:
    """What the format line says about it."""
    if joining == "no":
        return ""
    ends = "an end token only at the end of a file" if joining == "lines" else "an end token after each row"
    return (
        "rows are concatenated and cut into sequences of data.max_length, with "
        f"{ends} (set data.concatenate: false to train on each row separately)"
    )


def tokens_of_lines(lines: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int32]:
    """The lines as one run of token ids, without begin or end; each line keeps its break, blank ones are left out."""
    pieces: list[str] = [""]
    for line in lines:
        if len(pieces[-1]) >= _PIECE:
            pieces.append("")
        if line.strip():
            pieces[-1] += line if line.endswith("\n") else line + "\n"
    if pieces == [""]:
        return np.empty(0, np.int32)
    encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return np.concatenate([np.array(ids, dtype=np.int32) for ids in encoded])


def document_edges(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """(what stands before, what stands behind) a document: what the tokenizer adds by itself, and the end token."""
    added = list(tokenizer("")["input_ids"])
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    before = [begin] if begin is not None and begin in added else []
    return before, [end] if section.append_eos and end is not None else []


class Concatenator:
    """Cuts a stream of tokens into stretches of exactly `length`; the last of a source may be shorter."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._ids: list[NDArray[np.int32]] = []
        self._supervised: list[NDArray[np.uint8]] = []
        self._held = 0

    def add(
        self, ids: NDArray[np.int32], supervised: NDArray[np.uint8]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Stretches that are full now."""
        self._ids.append(ids)
        self._supervised.append(supervised)
        self._held += len(ids)
        return self._cut(self._held - self._held % self.length) if self._held >= self.length else []

    def rest(self) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """What is left, shorter than a stretch."""
        return self._cut(self._held)

    def _cut(self, stop: int) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        if not stop:
            return []
        ids, supervised = np.concatenate(self._ids), np.concatenate(self._supervised)
        self._ids, self._supervised, self._held = [ids[stop:].copy()], [supervised[stop:].copy()], self._held - stop
        starts = range(0, stop, self.length)
        return [
            (ids[start : min(start + self.length, stop)], supervised[start : min(start + self.length, stop)])
            for start in starts
        ]
