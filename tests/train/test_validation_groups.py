"""Groups of an evaluation are neighbouring batches, the same ones on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardtune.data.collate import REAL_TOKENS, SUPERVISED
from shardtune.data.order import BLANK, StepOrder
from shardtune.train.validation import GROUPS, validate


class Rows(torch.utils.data.Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


def batch_of(rows: list[int]) -> dict[str, Any]:
    """Each row has one supervised token, and its own number for its loss."""
    rows = [row for row in rows if row != BLANK]
    return {REAL_TOKENS: len(rows), SUPERVISED: torch.ones(len(rows)), "losses": torch.tensor(rows, dtype=torch.float)}


def sums_of(rank: int, world: int, rows: int, micro: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What one rank adds to the groups' losses and tokens."""
    found: list[torch.Tensor] = []

    def keep(sums: torch.Tensor, group: object) -> None:
        found.append(sums[:, :2].clone())
        sums += 1  # of the other ranks

    monkeypatch.setattr(dist, "all_reduce", keep)
    order = StepOrder(rows, micro_batch=micro, accumulation=1, world_size=world, rank=rank, seed=None)
    loss = SimpleNamespace(
        evaluate=lambda model, batch: SimpleNamespace(loss=batch["losses"].sum(), token_stats=torch.zeros(2))
    )
    validate(
        torch.nn.Linear(1, 1), loss, DataLoader(Rows(), batch_sampler=order, collate_fn=batch_of),  # type: ignore[arg-type]
        SimpleNamespace(world_size=world, rank=rank, device=torch.device("cpu"), control=None),  # type: ignore[arg-type]
        before_batch=lambda: None, stopped=lambda: False,
    )  # fmt: skip
    return found[0]


@pytest.mark.parametrize(("rows", "micro"), [(200, 1), (203, 2), (70, 3), (9, 4), (64, 2)])
def test_a_group_is_a_stretch_of_neighbouring_rows_on_any_number_of_ranks(
    rows: int, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = sums_of(0, 1, rows, micro, monkeypatch)
    for world in (2, 3):
        together = sum(sums_of(rank, world, rows, micro, monkeypatch) for rank in range(world))
        assert torch.equal(torch.as_tensor(together), alone)
    batches = -(-rows // micro)
    losses, tokens = alone[alone[:, 1] > 0].T.tolist()
    assert len(tokens) == min(GROUPS, batches) and sum(tokens) == rows
    first = 0
    for loss, size in zip(losses, map(int, tokens), strict=True):
        assert loss == sum(range(first, first + size))  # these rows, and no others
        first += size
    assert max(tokens[:-1], default=0) - min(tokens[:-1], default=0) <= micro
