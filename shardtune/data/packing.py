"""Which rows share a sequence? Best-fit decreasing over lengths, in bulk: rows of one length are placed together."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardtune.errors import UserInputError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Packs:
    """Rows by pack: pack `i` holds `rows[offsets[i] : offsets[i + 1]]`. Every row stands in exactly one pack."""

    rows: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members(self, number: int) -> Ints:
        """Row numbers of one pack, longest first."""
        if not 0 <= number < len(self):
            raise IndexError(f"pack {number} of {len(self)}")
        return self.rows[self.offsets[number] : self.offsets[number + 1]]

    def efficiency(self, lengths: NDArray[np.integer], capacity: int) -> float:
        """Share of the sequences that real tokens fill: tokens / (packs × capacity). 0 for no packs."""
        return float(lengths[self.rows].sum() / (capacity * len(self))) if len(self) else 0.0


def pack(lengths: NDArray[np.integer], capacity: int) -> Packs:
    """Rows into as few sequences of `capacity` tokens as best-fit decreasing finds.

    Longest row first, each into the open pack it fills up most; a new pack when it fits into none. Deterministic: the
    same lengths give the same packs. Packs with the same room left are alike, so all rows of one length are placed with
    a few array operations (1M rows take well under a second).

    Raises:
        UserInputError: a row is longer than `capacity`.
    """
    sizes: Ints = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.max() > capacity:
        row = int(sizes.argmax())
        raise UserInputError(
            f"Row {row} has {sizes[row]} tokens and does not fit into a packed sequence of {capacity}.",
            why="A row is never cut by packing.",
            fix="Prepare the data with a data.max_length of at most the packed length.",
        )
    if len(sizes) and sizes.min() < 1:
        raise ValueError("a row without tokens cannot be packed")
    order = np.argsort(-sizes, kind="stable")
    homes = _place(sizes[order], min(capacity, int(sizes.sum())))  # a pack that takes all rows is large enough
    by_pack = np.argsort(homes, kind="stable")
    members = np.bincount(homes) if len(homes) else np.empty(0, np.int64)
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(members)]).astype(np.int64))


def _place(falling: Ints, capacity: int) -> Ints:
    """The pack of each row, for lengths that never rise."""
    homes = np.empty(len(falling), np.int64)
    rooms = _Rooms()
    new = placed = 0
    changes = np.flatnonzero(np.diff(falling)) + 1
    for stop in [*changes.tolist(), len(falling)]:
        while placed < stop:
            length = int(falling[placed])
            room = rooms.smallest(length)
            if room is None:
                room, each = capacity, capacity // length
                fresh = -(-(stop - placed) // each)
                packs = np.arange(new, new + fresh, dtype=np.int64)
                new += fresh
            else:
                each = room // length
                packs = rooms.take(room, -(-(stop - placed) // each))
            # The pack just filled has the least room of all that fit, so best fit keeps filling it while it can.
            filled = min(len(packs) * each, stop - placed)
            homes[placed : placed + filled] = np.repeat(packs, each)[:filled]
            placed += filled
            full, rest = divmod(filled, each)
            rooms.put(room - each * length, packs[:full])
            if rest:
                rooms.put(room - rest * length, packs[full : full + 1])
    return homes


class _Rooms:
    """Open packs by the room they have left. Which rooms occur is one big integer, a bit per size."""

    def __init__(self) -> None:
        self.packs: dict[int, deque[Ints]] = defaultdict(deque)
        self.occur = 0

    def smallest(self, length: int) -> int | None:
        """The smallest room that takes `length`."""
        above = self.occur >> length
        return length + (above & -above).bit_length() - 1 if above else None

    def put(self, room: int, packs: Ints) -> None:
        if len(packs) and room:
            self.packs[room].append(packs)
            self.occur |= 1 << room

    def take(self, room: int, wanted: int) -> Ints:
        """At most `wanted` packs with that room, those opened to it first."""
        waiting = self.packs[room]
        first = waiting.popleft()
        if len(first) > wanted:
            waiting.appendleft(first[wanted:])
        if not waiting:
            self.occur &= ~(1 << room)
        return first[:wanted]
