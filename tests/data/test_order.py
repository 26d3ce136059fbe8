from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from fake_prepared import FakePrepared
from torch.utils.data import DataLoader

from shardtune.data.collate import REAL_TOKENS, Collator
from shardtune.data.order import BLANK, Documents, StepOrder
from shardtune.data.packing import pack
from shardtune.data.tokens import IGNORED


def ranks(
    rows: int, micro: int, accumulation: int, world: int, seed: int | None, epoch: int = 0
) -> list[list[list[int]]]:
    """[rank][micro-batch][row]"""
    orders = [
        StepOrder(rows, micro_batch=micro, accumulation=accumulation, world_size=world, rank=rank, seed=seed)
        for rank in range(world)
    ]
    for order in orders:
        order.set_epoch(epoch)
    return [list(order) for order in orders]


def steps(per_rank: list[list[list[int]]], accumulation: int) -> list[Counter[int]]:
    """The rows all ranks see in each optimizer step."""
    count = len(per_rank[0])
    return [
        Counter(
            row for rank in per_rank for batch in rank[at : at + accumulation] for row in batch if row != BLANK
        )
        for at in range(0, count, accumulation)
    ]  # fmt: skip


def random_cases(count: int) -> list[tuple[int, int, int, int, int, int]]:
    rng = random.Random(7)
    return [
        (rng.randint(1, 60), rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 6), rng.randrange(2**32), rng.randint(0, 3))
        for _ in range(count)
    ]  # fmt: skip


EDGES = [
    (1, 1, 1, 1, 0, 0),
    (1, 4, 2, 3, 0, 0),
    (2, 1, 1, 3, 5, 1),
    (3, 8, 1, 2, 0, 0),
    (12, 2, 2, 3, 42, 0),
    (13, 2, 2, 3, 42, 0),
]
CASES = [*EDGES, *random_cases(300)]


def test_each_step_sees_the_rows_it_would_see_on_one_process_with_the_same_effective_batch() -> None:
    for rows, micro, accumulation, world, seed, epoch in CASES:
        effective = micro * accumulation * world
        here = steps(ranks(rows, micro, accumulation, world, seed, epoch), accumulation)
        alone = steps(ranks(rows, effective, 1, 1, seed, epoch), 1)
        assert here == alone, (rows, micro, accumulation, world, seed, epoch)


def test_the_same_rows_come_in_a_step_whether_accumulated_or_spread_over_processes() -> None:
    spread = steps(ranks(50, 2, 1, 6, seed=3), 1)
    accumulated = steps(ranks(50, 2, 6, 1, seed=3), 6)
    assert spread == accumulated == steps(ranks(50, 1, 4, 3, seed=3), 4)


def test_every_row_comes_exactly_once_in_an_epoch() -> None:
    for rows, micro, accumulation, world, seed, epoch in CASES:
        seen = sum(steps(ranks(rows, micro, accumulation, world, seed, epoch), accumulation), Counter())
        assert seen == Counter(range(rows)), (rows, micro, accumulation, world, seed, epoch)


def test_all_ranks_have_the_micro_batches_that_len_says_and_none_is_empty_or_too_large() -> None:
    for rows, micro, accumulation, world, seed, epoch in CASES:
        per_rank = ranks(rows, micro, accumulation, world, seed, epoch)
        order = StepOrder(rows, micro_batch=micro, accumulation=accumulation, world_size=world, rank=0, seed=seed)
        assert {len(batches) for batches in per_rank} == {len(order)}
        assert all(1 <= len(batch) <= micro for batches in per_rank for batch in batches)


def test_only_a_lone_blank_fills_and_only_where_rows_have_run_out() -> None:
    for rows, micro, accumulation, world, seed, epoch in CASES:
        per_rank = ranks(rows, micro, accumulation, world, seed, epoch)
        for batches in per_rank:
            assert all(BLANK not in batch or batch == [BLANK] for batch in batches)
            assert all(len(batch) == micro and BLANK not in batch for batch in batches[:-1])


def test_ranks_without_a_row_get_a_blank() -> None:
    assert ranks(2, 1, 1, 4, seed=None) == [[[0]], [[1]], [[BLANK]], [[BLANK]]]


def test_an_epoch_has_its_own_order_and_a_seed_repeats_it() -> None:
    first, second = ranks(40, 1, 1, 1, seed=1), ranks(40, 1, 1, 1, seed=1, epoch=1)
    assert first != second
    assert first == ranks(40, 1, 1, 1, seed=1)
    assert first != ranks(40, 1, 1, 1, seed=2)


def test_without_a_seed_rows_keep_their_order() -> None:
    assert [row for batch in ranks(7, 3, 1, 1, seed=None)[0] for row in batch] == list(range(7))


def test_the_largest_seed_the_config_allows_works_in_a_late_epoch() -> None:
    assert len(ranks(5, 1, 1, 1, seed=2**32 - 1, epoch=100)[0]) == 5


@pytest.fixture
def prepared() -> FakePrepared:
    return FakePrepared([([5, 6, 7], 1), ([8, 9], 0), *(([n, n], 0) for n in range(10, 28))])


def test_a_blank_has_two_tokens_without_loss(prepared: FakePrepared) -> None:
    ((ids, labels),) = Documents(prepared, None)[BLANK]
    assert (ids.tolist(), labels.tolist()) == ([5, 6], [IGNORED, IGNORED])


def test_a_row_is_one_document_or_the_members_of_its_pack(prepared: FakePrepared) -> None:
    ((ids, labels),) = Documents(prepared, None)[0]
    assert (list(ids), list(labels)) == ([5, 6, 7], [IGNORED, 6, 7])
    packs = pack(np.array([len(prepared.row(n)[0]) for n in range(20)]), 8)
    packed = Documents(prepared, packs)
    assert len(packed) == len(packs) < 20
    seen = sorted(tuple(int(i) for i in ids) for n in range(len(packed)) for ids, _ in packed[n])
    assert seen == sorted(tuple(int(i) for i in prepared.row(n)[0]) for n in range(20))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_over_the_order_gives_batches_and_obeys_set_epoch(prepared: FakePrepared, workers: int) -> None:
    rows = FakePrepared([([n, n], 0) for n in range(20)])
    order = StepOrder(20, micro_batch=3, accumulation=1, world_size=1, rank=0, seed=0)
    loader = DataLoader(
        Documents(rows, None), batch_sampler=order, collate_fn=Collator(0, "padded"), num_workers=workers
    )
    first = [batch["input_ids"][:, 0].tolist() for batch in loader]
    order.set_epoch(1)
    second = [batch["input_ids"][:, 0].tolist() for batch in loader]
    order.set_epoch(1, skip=2)
    assert [batch["input_ids"][:, 0].tolist() for batch in loader] == second[2:]
    assert first == ranks(20, 3, 1, 1, seed=0)[0]
    assert second == ranks(20, 3, 1, 1, seed=0, epoch=1)[0]


def test_padding_and_blanks_carry_no_loss_even_when_pad_is_the_end_token(prepared: FakePrepared) -> None:
    documents = Documents(prepared, None)
    batch = Collator(9, "padded")([documents[n] for n in (0, 1, BLANK)])  # 9 is the last token of row 1 too
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED, 9, IGNORED], [IGNORED] * 3]
    assert batch[REAL_TOKENS] == 5  # a blank is no row


def test_the_rows_of_a_step_can_be_named_by_rank_and_micro_batch_as_the_ranks_see_them() -> None:
    for rows, micro, accumulation, world, seed, _ in (*EDGES, *random_cases(60)):
        order = StepOrder(rows, micro_batch=micro, accumulation=accumulation, world_size=world, rank=0, seed=seed)
        per_epoch = -(-rows // order.effective_batch)
        for epoch in (0, 1):
            seen = ranks(rows, micro, accumulation, world, seed, epoch)
            for number in range(len(seen[0])):
                step, place = divmod(number, accumulation)
                for rank in range(world):
                    real = [row for row in seen[rank][number] if row != BLANK]
                    assert order.rows_of(epoch * per_epoch + step, rank, place) == real
            assert Counter(order.rows_of(epoch * per_epoch)) == steps(seen, accumulation)[0]
