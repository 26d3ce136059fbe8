"""A prepared set made of lists, with the interface of the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardtune.data.prepared import CountedRemark
from shardtune.data.tokens import IGNORED


@dataclass
class FakeCounts:
    read: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    cut: int = 0
    split: int = 0
    dropped_long: int = 0
    dropped_short: int = 0
    dropped_unsupervised: int = 0
    without_assistant: int = 0
    skipped_errors: int = 0
    duplicates: int = 0
    largest_id: int = 0
    without_eos: int = 0
    errors: list[str] = field(default_factory=list)
    remarks: tuple[CountedRemark, ...] = ()


class FakePrepared:
    """Rows of (ids, number of leading tokens that are masked)."""

    def __init__(
        self, rows: list[tuple[list[int], int]], manifest: dict[str, Any] | None = None, **counts: Any
    ) -> None:
        self._rows = [(ids, [IGNORED] * masked + ids[masked:]) for ids, masked in rows]
        self.lengths = np.array([len(ids) for ids, _ in self._rows], dtype=np.int32)
        self.supervised = np.array([sum(x != IGNORED for x in labels[1:]) for _, labels in self._rows], dtype=np.int32)
        self.manifest = manifest or {}
        known = {
            "read": len(rows), "rows": len(rows), "tokens": int(self.lengths.sum()),
            "supervised": int(self.supervised.sum()), "largest_id": max((max(ids) for ids, _ in rows), default=0),
        }  # fmt: skip
        self.counts = FakeCounts(**{**known, **counts})

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = self._rows[index]
        return np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)

    def packs(self, capacity: int) -> Any:
        from shardtune.data.packing import pack

        return pack(self.lengths, capacity)


def fake_set(
    train: FakePrepared,
    val: FakePrepared | None = None,
    *,
    name: str = "chat",
    overlap: int = 0,
    folder: str = "/cache/ab",
) -> Any:
    choice = SimpleNamespace(name=name, why="the column 'messages' holds a list of messages", columns=("messages",))
    return SimpleNamespace(
        train=train, val=val, choice=choice, folder=Path(folder), from_cache=False, overlap=overlap, about={}
    )
