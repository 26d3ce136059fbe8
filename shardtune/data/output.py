"""Where do finished rows go? To the training or the validation side; joined ones through their document first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtune.data.chunks import Chunk, location
from shardtune.data.concatenate import Concatenator
from shardtune.data.formats import RowRemark
from shardtune.data.prepared import CountedRemark, PreparedWriter
from shardtune.data.stages import LENGTH, Recipe, Result, Side, TokenRun, sequence_rows

_ERRORS_KEPT = 10
_REMARKS_KEPT = 20  # different ones: a column of names read as roles has as many as names


class Output:
    """The two sides that rows are written to, and what was counted on the way."""

    def __init__(self, writers: Mapping[Side, PreparedWriter]) -> None:
        self.writers = writers
        self._tally: dict[Side, Counter[str]] = {"train": Counter(), "val": Counter()}
        self._errors: dict[Side, list[str]] = {"train": [], "val": []}
        self._remarks: dict[Side, dict[RowRemark, CountedRemark]] = {"train": {}, "val": {}}

    def take(self, chunk: Chunk, result: Result, document: Document | None) -> None:
        for side, tally in result.tally.items():
            self._tally[side].update(tally)
            self._count_remarks(side, chunk, result.remarks[side])
        for side, rows in result.rows.items():
            self.writers[side].add(rows)
        if document is not None and result.run is not None:
            for run in document.continued(chunk.file, result.run):
                self._join(document, run)

    def _count_remarks(self, side: Side, chunk: Chunk, found: Mapping[RowRemark, Sequence[int]]) -> None:
        known = self._remarks[side]
        for remark, numbers in found.items():
            if remark in known:
                known[remark] = replace(known[remark], rows=known[remark].rows + len(numbers))
            elif len(known) < _REMARKS_KEPT:
                known[remark] = CountedRemark(remark.kind, remark.detail, len(numbers), location(chunk, numbers[0]))

    def finish(self, document: Document | None) -> None:
        """The end of a source."""
        if document is not None:
            self._join(document, document.end())
            self._add(document, document.joiner.rest())

    def skip(self, side: Side, error: str) -> None:
        self._tally[side]["skipped_errors"] += 1
        if len(self._errors[side]) < _ERRORS_KEPT:
            self._errors[side].append(error)

    def rows(self, side: Side) -> int:
        return self.writers[side].rows

    def tokens(self, side: Side) -> int:
        return self.writers[side].tokens

    def read(self, side: Side) -> int:
        return self._tally[side]["read"]

    def counts(self, side: Side) -> dict[str, Any]:
        """What only the reader knows, as `PreparedCounts` names it."""
        names = (
            "read", "cut", "split", "dropped_long", "dropped_short", "dropped_unsupervised", "without_assistant",
            "skipped_errors",
        )  # fmt: skip
        return {
            **{name: self._tally[side][name] for name in names},
            "errors": tuple(self._errors[side]),
            "remarks": tuple(self._remarks[side].values()),
        }

    def uncut_p95(self, side: Side) -> int | None:
        """The length into which 95 % of the rows fit, had none been cut; None for a joined corpus."""
        tally = self._tally[side]
        lengths = sorted((int(key.removeprefix(LENGTH)), n) for key, n in tally.items() if key.startswith(LENGTH))
        reached, total = 0, sum(number for _, number in lengths)
        for length, number in lengths:
            reached += number
            if reached >= 0.95 * total:
                return length
        return None

    def _join(self, document: Document, run: TokenRun) -> None:
        self._add(document, document.joiner.add(run.ids, run.supervised))

    def _add(self, document: Document, cut: list[tuple[NDArray[np.int32], NDArray[np.uint8]]]) -> None:
        for side, rows in sequence_rows(cut, document.recipe, self._tally).items():
            self.writers[side].add(rows)


class Document:
    """The text that is being joined: where rows are lines, a file; otherwise its rows bring their own ends."""

    def __init__(self, recipe: Recipe, before: list[int], behind: list[int]) -> None:
        self.recipe = recipe
        self.joiner = Concatenator(recipe.max_length)
        self.before, self.behind = (before, behind) if recipe.joining == "lines" else ([], [])
        self.file: str | None = None

    def continued(self, file: str, run: TokenRun) -> Iterator[TokenRun]:
        if file != self.file:
            if self.file is not None:
                yield self.end()
            yield _learnt(self.before)
        self.file = file
        yield run

    def end(self) -> TokenRun:
        return _learnt(self.behind)


def _learnt(ids: list[int]) -> TokenRun:
    return TokenRun(np.array(ids, np.int32), np.ones(len(ids), np.uint8))


def taken_rows(marks: Sequence[int], weights: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Stored row of each row of an epoch: whole weights repeat a source's rows, the rest draws some of them.

    Args:
        marks: Stored rows before each source, and after the last.
    """
    taken: list[NDArray[np.int64]] = []
    for number, weight in enumerate(weights):
        start, stop = marks[number], marks[number + 1]
        taken += [np.arange(start, stop, dtype=np.int64)] * int(weight)
        drawn = round((weight - int(weight)) * (stop - start))
        order = np.random.default_rng([seed, number]).permutation(stop - start)
        taken.append(start + np.sort(order[:drawn]).astype(np.int64))
    return np.concatenate(taken)
