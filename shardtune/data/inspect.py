"""What does a prepared set look like in numbers? Each with how it was counted, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from shardtune.data.histogram import Bucket, length_buckets, share
from shardtune.data.show_rows import beginning
from shardtune.terminal import count

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from shardtune.data.checks import Finding
    from shardtune.data.prepare import PreparedSet
    from shardtune.data.prepared import Prepared, PreparedCounts
    from shardtune.data.show_rows import ShownRow

PERCENTILES = (1, 25, 50, 75, 90, 95, 99)
_LONGEST = 5
_SAME_WORDS = 8  # a common beginning of at least this many tokens (a system prompt) is not shown
NAMES = {"train": "training", "val": "validation"}


@dataclass(frozen=True)
class Fact:
    """A line of the report."""

    label: str
    text: str


@dataclass(frozen=True)
class LongRow:
    """One of the longest rows: its number in the prepared set, its tokens, how it begins."""

    number: int
    tokens: int
    beginning: str


@dataclass(frozen=True)
class SplitNumbers:
    """One split, counted. Lengths are those of the prepared rows, so at most max_length."""

    name: str  # train or val
    counts: PreparedCounts
    max_length: int
    shortest: int
    mean: float
    longest: int
    percentiles: dict[int, int]
    buckets: tuple[Bucket, ...]
    longest_rows: tuple[LongRow, ...]
    stored: int  # rows on disk, before weights
    packed_rows: int
    packing_efficiency: float  # tokens / (packed rows × max_length)

    @property
    def title(self) -> str:
        return NAMES[self.name]


@dataclass(frozen=True)
class Report:
    """All that `data inspect` says, on a terminal or as a page."""

    source: str
    format_name: str
    format_why: str
    folder: Path
    from_cache: bool
    overlap: int
    splits: tuple[SplitNumbers, ...]
    findings: tuple[Finding, ...]
    shown_of: str  # the split `rows` come from
    rows: tuple[ShownRow, ...]

    def facts(self) -> list[Fact]:
        """About the whole set."""
        found = [
            Fact("source", self.source),
            Fact("format", format_line(self.format_name, self.format_why)),
            Fact("prepared", f"{self.folder} ({'cached' if self.from_cache else 'just written'})"),
        ]
        val = next((split.counts.rows for split in self.splits if split.name == "val"), 0)
        if val:
            found.append(Fact("overlap", f"{self.overlap:,} of {val:,} validation rows are also in train"))
        return found


def format_line(name: str, why: str) -> str:
    return f"{name} ({why})" if why else name


def format_found(prepared: PreparedSet) -> tuple[str, str]:
    """Name and reason; of a mixture whose sources differ, all of them."""
    found = {each["path"]: each["format"] for each in prepared.about.get("sources", [])}
    if len({(each["name"], each["why"]) for each in found.values()}) <= 1:
        return prepared.choice.name, prepared.choice.why
    names = dict.fromkeys(each["name"] for each in found.values())
    return " and ".join(names), "; ".join(f"{path}: {each['name']}, {each['why']}" for path, each in found.items())


def count_split(
    prepared: Prepared, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> SplitNumbers | None:
    """The numbers of one split; None when it has no rows."""
    lengths = np.asarray(prepared.lengths, dtype=np.int64)
    if not len(lengths):
        return None
    packs = prepared.packs(max_length)
    longest = np.argsort(-lengths, kind="stable")[:_LONGEST]
    return SplitNumbers(
        name=name,
        counts=prepared.counts,
        max_length=max_length,
        shortest=int(lengths.min()),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        percentiles={p: percentile(lengths, p) for p in PERCENTILES},
        buckets=length_buckets(lengths, max_length),
        longest_rows=tuple(_long_rows(prepared, longest.tolist(), tokenizer)),
        stored=stored_rows(prepared),
        packed_rows=len(packs),
        packing_efficiency=float(packs.efficiency(prepared.lengths, max_length)),
    )


def _long_rows(prepared: Prepared, numbers: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[LongRow]:
    rows = [prepared.row(number)[0].tolist() for number in numbers]
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    same = len(list(alike)) if len(rows) > 1 else 0
    skipped = same if _SAME_WORDS <= same < min(map(len, rows)) else 0
    for number, ids in zip(numbers, rows, strict=True):
        text = beginning(ids[skipped:], tokenizer)
        yield LongRow(number, len(ids), f"… {text}" if skipped else text)


def percentile(lengths: np.ndarray, p: int) -> int:
    """The shortest length that at least p % of the rows do not exceed: always the length of a row."""
    return int(np.percentile(lengths, p, method="inverted_cdf"))


def stored_rows(prepared: Prepared) -> int:
    """Rows on disk, before weights repeat some or leave some out: what repetitions are counted among."""
    entry = prepared.manifest.get("files", {}).get("offsets.bin")
    return int(entry["bytes"]) // 8 - 1 if entry else prepared.counts.rows


def split_facts(numbers: SplitNumbers) -> list[Fact]:
    """About one split, in the order they are read."""
    counts = numbers.counts
    return [
        Fact("rows", f"{counts.rows:,} from {counts.read:,} read{_left_out(counts)}"),
        Fact("tokens", f"{counts.tokens:,}, {share(counts.supervised, counts.tokens)} of them supervised (carry loss)"),
        Fact("length", f"shortest {numbers.shortest:,}, mean {numbers.mean:,.0f}, longest {numbers.longest:,}"),
        Fact("", ", ".join(f"p{p} {tokens:,}" for p, tokens in numbers.percentiles.items())),
        Fact("too long", _too_long(counts, numbers.stored, numbers.max_length)),
        Fact("repeated", f"{_rows_of(counts.duplicates, numbers.stored)} identical to an earlier row"),
        Fact("end", _end(counts)),
        Fact("packing", packing(numbers)),
    ]


def counts_line(prepared: Prepared, max_length: int) -> str:
    """One split in one line."""
    counts = prepared.counts
    return (
        f"{count(counts.rows, 'row')} from {counts.read:,} read{_left_out(counts)}; {counts.tokens:,} tokens, "
        f"{share(counts.supervised, counts.tokens)} supervised; {_too_long(counts, stored_rows(prepared), max_length)}"
    )


def packing(numbers: SplitNumbers) -> str:
    return (
        f"{count(numbers.counts.rows, 'row')} fit into {count(numbers.packed_rows, 'sequence')} of "
        f"{numbers.max_length:,} tokens, {100 * numbers.packing_efficiency:.1f} % full"
    )


def _left_out(counts: PreparedCounts) -> str:
    reasons = [
        f"{number:,} {words}"
        for number, words in (
            (counts.dropped_short, "dropped as empty"),
            (counts.dropped_unsupervised, "dropped without a supervised token"),
            (counts.skipped_errors, "skipped as unreadable"),
        )
        if number
    ]
    return f" ({', '.join(reasons)})" if reasons else ""


def _too_long(counts: PreparedCounts, stored: int, max_length: int) -> str:
    affected = [
        f"{count(number, 'row')} {words} ({share(number, whole)})"
        for number, words, whole in (
            (counts.cut, "cut", stored),
            (counts.split, "split", counts.read),
            (counts.dropped_long, "dropped", counts.read),
        )
        if number
    ]
    return f"{', '.join(affected) or 'no row'} beyond max_length {max_length:,}"


def _end(counts: PreparedCounts) -> str:
    if not counts.without_eos:
        return "every row has a supervised end-of-sequence token"
    return f"{_rows_of(counts.without_eos, counts.rows)} without a supervised end-of-sequence token"


def _rows_of(number: int, rows: int) -> str:
    return f"{count(number, 'row')} ({share(number, rows)})" if number else "no row"
