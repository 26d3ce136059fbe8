"""How are the lengths of rows spread? Buckets that widen with length, and the lines of a terminal plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_MOST, _FEWEST, _LINEAR = 20, 6, 12  # buckets: more are merged, fewer are cut finer, and then at most so many
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MARK = "◀ max_length"


@dataclass(frozen=True)
class Bucket:
    """Rows of `low` to `high` tokens, both included."""

    low: int
    high: int
    rows: int
    tokens: int
    is_limit: bool = False  # the rows of exactly max_length tokens, where cut rows pile up

    @property
    def label(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


def length_buckets(lengths: np.ndarray, max_length: int) -> tuple[Bucket, ...]:
    """Buckets from the shortest row to max_length, whose own bucket is always there, also when empty."""
    below, over = lengths[lengths < max_length], lengths[lengths > max_length]
    found = [_bucket(lengths, low, high - 1) for low, high in pairwise(_edges(below, max_length))]
    found.append(_bucket(lengths, max_length, max_length, is_limit=True))
    if len(over):
        found.append(_bucket(lengths, max_length + 1, int(over.max())))
    return tuple(found)


def _bucket(lengths: np.ndarray, low: int, high: int, *, is_limit: bool = False) -> Bucket:
    inside = lengths[(lengths >= low) & (lengths <= high)]
    return Bucket(low, high, len(inside), int(inside.sum()), is_limit)


def _edges(below: np.ndarray, max_length: int) -> list[int]:
    """Where buckets begin, and one past the last; none when no row is shorter than max_length."""
    if not len(below):
        return []
    shortest, longest = int(below.min()), int(below.max())
    edges = _between(shortest, longest, _powers(halves=True))
    if len(edges) - 1 > _MOST:
        edges = _between(shortest, longest, _powers(halves=False))
    if len(edges) - 1 < _FEWEST:
        step = next(s for s in _round_steps() if (longest - shortest) // s < _LINEAR - 1)
        edges = list(range(shortest - shortest % step, longest + step + 1, step))
        edges = edges[: next(i for i, edge in enumerate(edges) if edge > longest) + 1]
    return [*edges[:-1], min(edges[-1], max_length)]


def _between(shortest: int, longest: int, candidates: Iterator[int]) -> list[int]:
    edges = [next(candidates)]
    for edge in candidates:
        if edge <= shortest:
            edges = [edge]
            continue
        edges.append(edge)
        if edge > longest:
            break
    return edges


def _powers(*, halves: bool) -> Iterator[int]:
    """0, 1, 2, 4, 8 … and, with halves, the 3, 6, 12 … between them: readable edges that grow with length."""
    yield 0
    power = 1
    while True:
        yield power
        if halves and power > 1:
            yield power * 3 // 2
        power *= 2


def _round_steps() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def histogram_lines(buckets: tuple[Bucket, ...], columns: int) -> list[str]:
    """The plot, one line per bucket, at most `columns` wide: tokens, bar, rows, share of rows (wide: and of tokens).

    The longest bar fills its space; a bucket with any row shows at least a sliver.
    """
    rows, tokens = sum(b.rows for b in buckets), sum(b.tokens for b in buckets)
    label_width = max(len("tokens"), *(len(b.label) for b in buckets))
    rows_width = max(len("rows"), *(len(f"{b.rows:,}") for b in buckets))
    wide = columns >= 100
    tail_width = rows_width + 2 + 8 + (12 if wide else 0)
    bar_width = max(8, columns - label_width - 2 - tail_width - 2 - len(_MARK))
    most = max(b.rows for b in buckets)
    head = f"{'tokens':>{label_width}}  {'':<{bar_width}}{'rows':>{rows_width + 2}}{'share':>8}"
    lines = [head + (f"{'of tokens':>12}" if wide else "")]
    for bucket in buckets:
        line = f"{bucket.label:>{label_width}}  {bar(bucket.rows, most, bar_width):<{bar_width}}"
        line += f"{bucket.rows:>{rows_width + 2},}{share(bucket.rows, rows):>8}"
        line += f"{share(bucket.tokens, tokens):>12}" if wide else ""
        lines.append(line + (f"  {_MARK}" if bucket.is_limit else ""))
    return lines


def bar(value: int, most: int, width: int) -> str:
    """A bar in eighths of a character."""
    if not value:
        return ""
    eighths = max(1, round(value / most * width * 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def share(part: int, whole: int) -> str:
    """`41 %`; what is small but not nothing never reads 0 %."""
    if not part or not whole:
        return "0 %"
    percent = 100 * part / whole
    if percent < 0.1:
        return "<0.1 %"
    if percent < 10:
        return f"{percent:.1f} %"
    if part < whole:
        return f"{min(percent, 99.9):.1f} %" if percent > 99 else f"{percent:.0f} %"
    return f"{percent:.0f} %"
