"""What does one forward pass see? Rows become a batch: padded, packed side by side, or packed flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from shardtune.data.tokens import IGNORED

SUPERVISED, TARGETS = "supervised", "targets"  # where something is predicted (flat positions), and what
REAL_TOKENS = "real_tokens"  # rides along for counting; taken out before the model sees the batch
Row = tuple[np.ndarray, np.ndarray]  # token ids, labels


@dataclass(frozen=True)
class Collator:
    """Makes batches.

    - `padded`: one document per row, padded on the right, with an attention mask.
    - `packed`: several documents per row; positions restart with each, and transformers derives the block-diagonal mask
      from that. Padding at the end of a row is a document of its own that carries no loss.
    - `flat`: all documents of the batch in one row without any padding, with their bounds, for variable-length kernels.

    Args:
        fill_to: Rows are padded to this many tokens, and attention over a flat batch assumes that no
            document is longer, whatever this batch has: compiled code then sees one shape. For rows that are nearly
            full.
        fill_rows: Likewise the batch, to this many rows: the last one of an epoch may have fewer.

    A label at the first token of a document is taken out: nothing that stands before it may predict it.
    """

    pad_token_id: int
    layout: Literal["padded", "packed", "flat"]
    fill_to: int | None = None
    fill_rows: int = 0

    def __call__(self, rows: Sequence[Sequence[Row]]) -> dict[str, torch.Tensor | int]:
        """`rows`: per row of the batch, its documents."""
        # A document that teaches nothing is a BLANK, which stands for no row at all.
        real = sum(len(ids) for row in rows for ids, labels in row if (labels != IGNORED).any())
        if self.layout == "flat":
            batch = self._flat([document for row in rows for document in row], len(rows))
        else:
            batch = self._rows(rows)
        return {**batch, **_supervised(batch["labels"]), REAL_TOKENS: real}

    def _flat(self, documents: Sequence[Row], rows: int) -> dict[str, torch.Tensor | int]:
        missing = max(rows, self.fill_rows) * (self.fill_to or 0) - sum(len(ids) for ids, _ in documents)
        documents = [*documents, *self._padding(missing)]
        lengths = np.array([len(ids) for ids, _ in documents])
        bounds = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
        ids, labels, positions = _joined(documents)
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(positions)[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": self.fill_to or int(lengths.max()),
            "max_length_k": self.fill_to or int(lengths.max()),
        }

    def _padding(self, tokens: int) -> list[Row]:
        """Documents of padding, none longer than a row."""
        if self.fill_to is None:
            return []
        lengths = [min(self.fill_to, tokens - start) for start in range(0, tokens, self.fill_to)]
        return [(np.full(length, self.pad_token_id), np.full(length, IGNORED)) for length in lengths]

    def _rows(self, rows: Sequence[Sequence[Row]]) -> dict[str, torch.Tensor | int]:
        # A row of padding is a document, so that its tokens have something to look at.
        rows = [*rows, *([row] for row in self._padding((self.fill_rows - len(rows)) * (self.fill_to or 0)))]
        width = max(self.fill_to or 0, *(sum(len(ids) for ids, _ in row) for row in rows))
        input_ids = np.full((len(rows), width), self.pad_token_id, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        positions = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for number, row in enumerate(rows):
            ids, own_labels, own_positions = _joined(row)
            length = len(ids)
            input_ids[number, :length], labels[number, :length] = ids, own_labels
            positions[number, :length], positions[number, length:] = own_positions, np.arange(width - length)
            mask[number, :length] = 1
        batch: dict[str, torch.Tensor | int] = {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
        }
        if self.layout == "packed":
            # No attention mask: transformers looks for documents in the positions only when there is none.
            return {**batch, "position_ids": torch.from_numpy(positions)}
        return {**batch, "attention_mask": torch.from_numpy(mask)}


def _supervised(labels: torch.Tensor | int) -> dict[str, torch.Tensor | int]:
    """The flat positions whose next token is supervised, and that token: counted here, where nothing has to wait."""
    assert isinstance(labels, torch.Tensor)
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).reshape(-1)
    where = (following != IGNORED).nonzero()[:, 0]
    return {SUPERVISED: where, TARGETS: following[where]}


def _joined(documents: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, labels and positions of documents laid end to end."""
    ids = np.concatenate([ids for ids, _ in documents]).astype(np.int64)
    labels = np.concatenate([labels for _, labels in documents]).astype(np.int64)
    positions = np.concatenate([np.arange(len(own)) for own, _ in documents])
    labels[positions == 0] = IGNORED
    return ids, labels, positions
