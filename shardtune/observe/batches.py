"""What is in a batch? Tokens that carry loss, real ones, padding, and the documents attention runs over.

Read where batches leave the loader, on the host: the same questions to a tensor on a GPU would make the process wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100  # the label of a token without loss, in every library
_COUNTED = "real_tokens"  # our own collator has counted already: it knows rows that stand for no row at all


@dataclass(frozen=True)
class BatchCount:
    """One micro-batch.

    Args:
        shape: (rows, width) of `input_ids`.
        supervised: Tokens whose prediction enters the loss.
        real: Tokens of documents.
        lengths: Tokens of each document, between whose bounds attention stays.
    """

    shape: tuple[int, ...]
    supervised: int
    real: int
    lengths: tuple[int, ...]

    @property
    def computed(self) -> int:
        """Every token the model computes, padding too."""
        rows = 1
        for size in self.shape:
            rows *= size
        return rows

    @property
    def padded(self) -> int:
        return self.computed - self.real


def count_batch(batch: object) -> BatchCount | None:
    """None where it cannot be counted without waiting: no token ids and labels, or not on the host."""
    if not isinstance(batch, Mapping):
        return None
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.dim() != 2:
        return None
    if ids.device.type != "cpu" or labels.device.type != "cpu" or labels.shape != ids.shape:
        return None
    with_loss = labels != _IGNORED
    supervised = int(with_loss[:, 1:].sum())
    counted = batch.get(_COUNTED)
    lengths = _lengths(batch, ids, with_loss if isinstance(counted, int) else None)
    real = counted if isinstance(counted, int) else sum(lengths)
    return BatchCount(tuple(ids.shape), supervised, real, tuple(lengths))


def _lengths(batch: Mapping[str, Any], ids: Tensor, with_loss: Tensor | None) -> list[int]:
    """Of each document, in order. Given `with_loss`, documents that teach nothing are padding and left out."""
    bounds, positions, mask = batch.get("cu_seq_lens_q"), batch.get("position_ids"), batch.get("attention_mask")
    if isinstance(bounds, Tensor):
        edges = bounds.long()
    elif isinstance(mask, Tensor) and not isinstance(positions, Tensor):
        rows = mask if with_loss is None else mask[with_loss.any(dim=1)]
        return [length for length in rows.sum(dim=1).tolist() if length]
    elif isinstance(positions, Tensor) and positions.shape == ids.shape:
        # Positions count up by one within a document; anything else begins one. A row begins one in any case.
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        edges = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([ids.numel()])])
    else:
        return [ids.shape[1]] * ids.shape[0]
    lengths = torch.diff(edges)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:  # packed and padded: padding belongs to no document
        lengths = _sum_between(mask.flatten(), edges)
    if with_loss is not None:
        lengths = lengths[_sum_between(with_loss.flatten(), edges) > 0]
    return [length for length in lengths.tolist() if length]


def _sum_between(values: Tensor, edges: Tensor) -> Tensor:
    sums = torch.cat([torch.zeros(1, dtype=torch.long), values.long().cumsum(0)])
    return torch.diff(sums[edges])


def attended_pairs(lengths: tuple[int, ...], window: int | None = None) -> int:
    """(query, key) pairs of causal attention: each token sees itself and what stands before it in its document."""
    pairs = 0
    for length in lengths:
        seen = length if window is None else min(length, window)
        # The first `seen` tokens see 1, 2, … `seen` keys, every later one `seen`.
        pairs += seen * (seen + 1) // 2 + (length - seen) * seen
    return pairs
