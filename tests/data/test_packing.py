from __future__ import annotations

import time

import numpy as np
import pytest

from shardtune.data.packing import Packs, pack
from shardtune.errors import UserInputError


def instruction_like(rows: int, longest: int = 4096, seed: int = 0) -> np.ndarray:
    """Lengths as of instruction data: log-normal with a median of about 180 tokens, clipped."""
    normal = np.random.default_rng(seed).standard_normal(rows)
    return np.clip(np.exp(normal * 0.8 + 5.2), 16, longest).astype(np.int64)


def fullest_first(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing as the textbook says it, one row at a time."""
    packs: list[list[int]] = []
    room: list[int] = []
    for row in np.argsort(-lengths, kind="stable"):
        fits = [(room[i], i) for i in range(len(packs)) if room[i] >= lengths[row]]
        if not fits:
            packs.append([])
            room.append(capacity)
        home = min(fits)[1] if fits else len(packs) - 1
        packs[home].append(int(row))
        room[home] -= int(lengths[row])
    return packs


def as_lists(packs: Packs) -> list[list[int]]:
    return [packs.members(i).tolist() for i in range(len(packs))]


def test_every_row_stands_in_one_pack_and_none_overflows() -> None:
    lengths = instruction_like(20_000)
    packs = pack(lengths, 4096)
    assert np.array_equal(np.sort(packs.rows), np.arange(len(lengths)))
    assert packs.offsets[0] == 0
    assert packs.offsets[-1] == len(lengths)
    assert np.all(np.diff(packs.offsets) > 0)
    assert np.add.reduceat(lengths[packs.rows], packs.offsets[:-1]).max() <= 4096


@pytest.mark.parametrize("seed", range(20))
def test_the_rooms_left_are_those_of_textbook_best_fit_decreasing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(5, 60))
    lengths = rng.integers(1, capacity + 1, rng.integers(1, 300)) // int(rng.integers(1, 4)) + 1
    lengths = np.minimum(lengths, capacity)
    # Packs with the same room are alike to best fit, so which of them a row went to may differ.
    ours = sorted(int(lengths[members].sum()) for members in as_lists(pack(lengths, capacity)))
    assert ours == sorted(int(lengths[members].sum()) for members in fullest_first(lengths, capacity))


def test_at_least_97_percent_of_the_tokens_of_instruction_like_rows_are_real() -> None:
    lengths = instruction_like(50_000)
    assert 150 < np.median(lengths) < 220
    packs = pack(lengths, 4096)
    efficiency = packs.efficiency(lengths, 4096)
    assert efficiency == pytest.approx(lengths.sum() / (len(packs) * 4096))
    assert efficiency >= 0.97


def test_the_same_lengths_give_the_same_packs_and_equal_rows_keep_their_order() -> None:
    lengths = instruction_like(5000)
    first, second = pack(lengths, 4096), pack(lengths.copy(), 4096)
    assert np.array_equal(first.rows, second.rows)
    assert np.array_equal(first.offsets, second.offsets)
    assert as_lists(pack(np.array([2, 2, 2, 2, 2]), 4)) == [[0, 1], [2, 3], [4]]


def test_a_row_fills_the_pack_it_leaves_least_room_in() -> None:
    lengths = np.array([7, 6, 4, 3])
    assert as_lists(pack(lengths, 10)) == [[0, 3], [1, 2]]


def test_rows_of_full_length_stand_alone() -> None:
    assert as_lists(pack(np.array([8, 8, 1]), 8)) == [[0], [1], [2]]


def test_no_rows_make_no_packs() -> None:
    packs = pack(np.array([], dtype=np.int64), 16)
    assert len(packs) == 0
    assert packs.efficiency(np.array([]), 16) == 0
    with pytest.raises(IndexError):
        packs.members(0)


def test_a_row_longer_than_the_sequence_is_an_error_that_names_it() -> None:
    with pytest.raises(UserInputError) as caught:
        pack(np.array([4, 17, 3]), 16)
    assert "Row 1 has 17 tokens" in caught.value.what
    assert "data.max_length" in caught.value.fix


def test_a_row_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        pack(np.array([4, 0]), 16)


def test_a_million_rows_are_packed_within_a_minute_on_one_core() -> None:
    lengths = instruction_like(1_000_000)
    began = time.process_time()
    packs = pack(lengths, 4096)
    assert time.process_time() - began < 60
    assert packs.efficiency(lengths, 4096) >= 0.97


def test_a_length_that_no_row_comes_near_costs_nothing() -> None:
    packs = pack(np.array([5, 3, 9]), 2**40)
    assert len(packs) == 1 and packs.members(0).tolist() == [2, 0, 1]
