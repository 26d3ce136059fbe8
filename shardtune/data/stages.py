"""What becomes of a chunk of rows? read → render → tokenise → mask → length policy. Pure: any process can do it."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardtune.data.chunks import SHOWN, BadRow, Chunk, Row, lone_surrogate, rows_of
from shardtune.data.concatenate import Concatenation, tokens_of_lines
from shardtune.data.formats import Rendered, RowProblem, RowRemark
from shardtune.data.prepared import EncodedRows
from shardtune.data.tokens import IGNORED, Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Side = Literal["train", "val"]
LENGTH = "length "  # of a row before it is cut, in the tally: for saying which max_length would have been enough
# Tokens that end a turn or a text under other names than eos_token.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|endoftext|>")


@dataclass(frozen=True)
class Recipe:
    """All that is needed to turn rows of one source into tokens."""

    render: Callable[[Mapping[str, Any]], Rendered]
    encoder: Encoder
    tokenizer: PreTrainedTokenizerBase
    columns: tuple[str, ...]
    joining: Concatenation
    max_length: int
    long_rows: Literal["truncate", "drop", "split"]
    ends: tuple[int, ...]
    held_out: float = 0.0  # share of the rows that goes to validation
    side: Side = "train"  # where the others go


@dataclass(frozen=True)
class TokenRun:
    """The tokens of a chunk whose rows are to be joined."""

    ids: NDArray[np.int32]
    supervised: NDArray[np.uint8]


@dataclass(frozen=True)
class Result:
    """A chunk's rows as tokens, by the side they are for, and what was left out."""

    rows: dict[Side, EncodedRows]
    run: TokenRun | None
    tally: dict[Side, Counter[str]]
    problems: list[tuple[int, BadRow]]
    remarks: dict[Side, dict[RowRemark, list[int]]]  # numbers of the rows each is about


def process(recipe: Recipe, chunk: Chunk) -> Result:
    """Everything that happens to a chunk; the same chunk gives the same result in every process."""
    tally: dict[Side, Counter[str]] = {"train": Counter(), "val": Counter()}
    problems: list[tuple[int, BadRow]] = []
    remarks: dict[Side, dict[RowRemark, list[int]]] = {"train": {}, "val": {}}
    sides: list[Side] = []
    rendered: list[Rendered] = []
    for number, row in rows_of(chunk):
        text = row if isinstance(row, BadRow) else _rendered(recipe, row)
        if isinstance(text, BadRow):
            tally[recipe.side]["read"] += 1
            problems.append((number, text))
            continue
        assert not isinstance(row, BadRow)
        side: Side = "val" if recipe.held_out and is_held_out(row, recipe) else recipe.side
        tally[side]["read"] += 1
        if text.special and text.text and not text.spans:
            tally[side]["without_assistant"] += 1
        for remark in text.remarks:
            remarks[side].setdefault(remark, []).append(number)
        if text.text.strip():
            rendered.append(text)
            sides.append(side)
        elif recipe.joining != "lines":  # between joined lines a blank one is no row that is missing
            tally[side]["dropped_short"] += 1
            remarks[side].setdefault(RowRemark("empty row"), []).append(number)
    if recipe.joining == "lines":
        ids = tokens_of_lines([text.text for text in rendered], recipe.tokenizer)
        return Result({}, TokenRun(ids, np.ones(len(ids), np.uint8)), tally, problems, remarks)
    encoded = recipe.encoder.encode(rendered) if rendered else []
    pairs = [(e.ids, e.labels) for e in encoded]
    if recipe.joining == "documents":
        return Result({}, _flat(pairs), tally, problems, remarks)
    rows = {
        side: _shaped(recipe, [pair for pair, s in zip(pairs, sides, strict=True) if s == side], tally[side])
        for side in dict.fromkeys(sides)
    }
    return Result(rows, None, tally, problems, remarks)


def is_held_out(row: Row, recipe: Recipe) -> bool:
    """By a hash of the columns that are read: the same row always goes to the same side, wherever it stands."""
    content = json.dumps([row.get(column) for column in recipe.columns], sort_keys=True, default=str)
    return _share(content.encode()) < recipe.held_out


def sequence_rows(
    cut: Sequence[tuple[NDArray[np.int32], NDArray[np.uint8]]], recipe: Recipe, tally: dict[Side, Counter[str]]
) -> dict[Side, EncodedRows]:
    """Stretches of a joined corpus as rows. Held out are whole stretches: single lines would tear the text apart."""
    sides: dict[Side, list[tuple[NDArray[np.int32], NDArray[np.uint8]]]] = {}
    for ids, supervised in cut:
        side: Side = "val" if recipe.held_out and _share(ids.tobytes()) < recipe.held_out else recipe.side
        if len(ids) < 2:
            tally[side]["dropped_short"] += 1
        else:
            sides.setdefault(side, []).append((ids, supervised))
    return {
        side: _kept(
            np.concatenate([ids for ids, _ in rows]),
            np.concatenate([supervised for _, supervised in rows]),
            np.array([len(ids) for ids, _ in rows]),
            recipe.ends,
            tally[side],
        )
        for side, rows in sides.items()
    }


def end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens that tell a reader to stop: eos, and what chat templates end a turn with."""
    vocabulary = tokenizer.get_vocab()
    ids = {tokenizer.eos_token_id, *(vocabulary.get(token) for token in _END_TOKENS)}
    return tuple(sorted(number for number in ids if number is not None))


def _share(content: bytes) -> float:
    digest = hashlib.blake2b(content, digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") / 2**64


def _rendered(recipe: Recipe, row: Row) -> Rendered | BadRow:
    # A key that a line of JSON lacks is an empty cell, as in every other format.
    whole = row if all(column in row for column in recipe.columns) else {**dict.fromkeys(recipe.columns), **row}
    try:
        rendered = recipe.render(whole)
        if not rendered.text.isascii():
            rendered.text.encode("utf-8")
    except RowProblem as problem:
        return BadRow(str(problem), _preview(row))
    except RecursionError:
        return BadRow("nested too deeply")
    except UnicodeEncodeError as error:
        return BadRow(lone_surrogate(error))
    return rendered


def _preview(row: Row) -> str:
    return json.dumps(row, ensure_ascii=True, default=str)[:SHOWN]


def _flat(pairs: Iterable[tuple[list[int], list[int]]]) -> TokenRun:
    ids, labels = array("i"), array("i")  # faster than numpy takes lists
    for row_ids, row_labels in pairs:
        ids.fromlist(row_ids)
        labels.fromlist(row_labels)
    return TokenRun(np.array(ids, np.int32), (np.array(labels) != IGNORED).astype(np.uint8))


def _shaped(recipe: Recipe, pairs: list[tuple[list[int], list[int]]], tally: Counter[str]) -> EncodedRows:
    """The length policy, then what is too short or carries no loss goes."""
    limit = recipe.max_length
    kept: list[tuple[list[int], list[int]]] = []
    was_cut: list[bool] = []
    for ids, labels in pairs:
        tally[f"{LENGTH}{len(ids)}"] += 1
        parts = [(ids, labels)]
        too_long = len(ids) > limit
        if too_long and recipe.long_rows == "drop":
            tally["dropped_long"] += 1
            continue
        if too_long and recipe.long_rows == "truncate":
            parts = [(ids[:limit], labels[:limit])]
        elif too_long:
            tally["split"] += 1
            parts = [(ids[start : start + limit], labels[start : start + limit]) for start in range(0, len(ids), limit)]
        for part in parts:
            if len(part[0]) < 2:  # predicts nothing; padded with an end token it would falsify the loss
                tally["dropped_short"] += 1
            else:
                kept.append(part)
                was_cut.append(too_long and recipe.long_rows == "truncate")
    run = _flat(kept)
    return _kept(
        run.ids, run.supervised, np.array([len(ids) for ids, _ in kept], np.int64), recipe.ends, tally, was_cut
    )


def _kept(
    ids: NDArray[np.int32],
    supervised: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    ends: tuple[int, ...],
    tally: Counter[str],
    was_cut: Sequence[bool] = (),
) -> EncodedRows:
    """The rows that carry loss. All have at least two tokens, so that every sum below is over one row."""
    if not len(lengths):
        learnt, has_end = np.empty(0, np.int32), np.empty(0, np.bool_)
        return EncodedRows(ids, supervised, lengths, learnt, np.empty(0, np.uint64), has_end)
    starts = np.cumsum(lengths) - lengths
    predicted = supervised.copy()
    predicted[starts] = 0  # the first token is never predicted, so its label counts for nothing
    learnt = np.add.reduceat(predicted, starts, dtype=np.int32)
    has_end = np.add.reduceat(predicted & np.isin(ids, ends), starts, dtype=np.int32) > 0
    keep = learnt > 0
    tally["dropped_unsupervised"] += int((~keep).sum())
    tally["cut"] += int((keep & np.array(was_cut, np.bool_)).sum()) if len(was_cut) else 0
    if not keep.all():
        tokens = np.repeat(keep, lengths)
        ids, supervised = ids[tokens], supervised[tokens]
        lengths, learnt, has_end = lengths[keep], learnt[keep], has_end[keep]
    return EncodedRows(ids, supervised, lengths, learnt, _hashes(ids, lengths), has_end)


def _hashes(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    stops = np.cumsum(lengths).tolist()
    view = ids.data.cast("B")
    digests = [
        hashlib.blake2b(view[4 * start : 4 * stop], digest_size=8).digest() for start, stop in pairwise([0, *stops])
    ]
    return np.frombuffer(b"".join(digests), np.uint64)
