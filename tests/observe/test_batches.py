from __future__ import annotations

import numpy as np
import pytest
import torch

from shardtune.data import collate
from shardtune.observe import batches
from shardtune.observe.batches import count_batch

IGNORED = -100


def rows(*documents: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """One row per document, each half supervised."""
    found = []
    for length in documents:
        labels = np.arange(length) + 1
        labels[: length // 2] = IGNORED
        found.append([(np.arange(length) + 1, labels)])
    return found


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_every_layout_of_our_collator_has_the_same_tokens_and_documents(layout: str) -> None:
    batch = collate.Collator(0, layout)(rows(8, 5, 6))  # type: ignore[arg-type]
    counted = count_batch(batch)
    assert counted is not None
    assert counted.lengths == (8, 5, 6) and counted.real == 19 and counted.supervised == 4 + 3 + 3
    assert counted.padded == (0 if layout == "flat" else 3 + 2)


def test_a_row_that_stands_for_none_is_padding() -> None:
    blank = [[(np.array([1, 2]), np.full(2, IGNORED))]]
    batch = collate.Collator(0, "packed")([*rows(8), *blank])
    counted = count_batch(batch)
    assert counted is not None and (counted.real, counted.supervised, counted.padded) == (8, 4, 8)
    assert counted.lengths == (8,)


def test_documents_side_by_side_in_a_row_are_told_apart_by_their_positions() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    counted = count_batch({"input_ids": ids, "labels": ids, "position_ids": positions})
    assert counted is not None and counted.lengths == (3, 3, 4, 2) and counted.padded == 0


def test_a_mask_beside_positions_takes_padding_out_of_the_last_document() -> None:
    ids = torch.ones(1, 6, dtype=torch.long)
    positions, mask = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    counted = count_batch({"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": mask})
    assert counted is not None and counted.lengths == (3, 1) and (counted.real, counted.padded) == (4, 2)


def test_the_first_token_of_a_row_is_predicted_by_nothing() -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    counted = count_batch({"input_ids": ids, "labels": ids})
    assert counted is not None and counted.supervised == 8 and counted.lengths == (5, 5)


@pytest.mark.parametrize("batch", [None, [], {"input_ids": torch.ones(1, 3)}, {"pixel_values": torch.ones(1)}])
def test_what_is_no_batch_of_tokens_is_not_counted(batch: object) -> None:
    assert count_batch(batch) is None


def test_what_lies_on_a_device_is_not_counted_since_asking_would_wait_for_it() -> None:
    ids = torch.ones(1, 3, dtype=torch.long, device="meta")
    assert count_batch({"input_ids": ids, "labels": ids}) is None


def test_the_collators_own_count_goes_by_the_same_name() -> None:
    assert batches._COUNTED == collate.REAL_TOKENS


def test_a_padded_row_that_teaches_nothing_is_padding_to_our_own_collator() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    labels = torch.tensor([[-100, 1, 1, -100], [-100] * 4])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    ours, others = count_batch({**batch, "real_tokens": 3}), count_batch(batch)
    assert ours is not None and others is not None
    assert (ours.lengths, ours.real, ours.padded) == ((3,), 3, 5)
    assert (others.lengths, others.real, others.padded) == ((3, 4), 7, 1)
