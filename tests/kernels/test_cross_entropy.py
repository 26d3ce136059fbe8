"""Head and loss together, against the logits written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardtune.kernels import cross_entropy
from shardtune.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def problem(positions: int = 40, size: int = 24, vocabulary: int = 50, supervised: int = 17) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(positions, size, generator=generator)
    head = torch.randn(vocabulary, size, generator=generator)
    where = torch.randperm(positions, generator=generator)[:supervised].sort().values
    return hidden, head, where, torch.randint(vocabulary, (supervised,), generator=generator)


def loss_and_gradient(function: object, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    own = hidden.clone().requires_grad_()
    loss, told = function(own, *rest)  # type: ignore[operator]
    (loss * 0.3).backward()
    return loss.detach(), told, own.grad


@pytest.mark.parametrize("rows_at_once", [1, 8, 1000])
def test_loss_gradient_entropy_and_accuracy_are_those_of_the_logits(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(positions=400, supervised=300)
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", rows_at_once * 50 * 4)
    got = loss_and_gradient(linear_cross_entropy, *given)
    meant = loss_and_gradient(linear_cross_entropy_reference, *given)
    for ours, theirs in zip(got, meant, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert 0 < got[1][1] < 300  # some are right, not all: the count means something


def test_positions_that_predict_nothing_get_no_gradient() -> None:
    hidden, head, where, labels = problem()
    _, _, gradient = loss_and_gradient(linear_cross_entropy, hidden, head, where, labels)
    silent = torch.ones(len(hidden), dtype=torch.bool)
    silent[where] = False
    assert not gradient[silent].any() and gradient[where].any(dim=-1).all()


def test_a_batch_without_a_supervised_token_has_the_loss_zero_and_still_a_gradient() -> None:
    hidden, head, _, _ = problem()
    nothing = torch.empty(0, dtype=torch.int64)
    loss, told, gradient = loss_and_gradient(linear_cross_entropy, hidden, head, nothing, nothing)
    assert loss == 0 and not told.any() and not gradient.any()


def test_large_logits_do_not_overflow() -> None:
    hidden, head, where, labels = problem()
    got = loss_and_gradient(linear_cross_entropy, hidden * 1e4, head, where, labels)
    meant = loss_and_gradient(linear_cross_entropy_reference, hidden * 1e4, head, where, labels)
    assert torch.isfinite(got[0]) and torch.allclose(got[0], meant[0], rtol=1e-5)
    assert torch.allclose(got[2], meant[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows_at_once", [8, 1000])
def test_rows_that_stand_in_for_some_of_the_head_train_and_the_others_count_as_before(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", rows_at_once * 50 * 4)
    hidden, head, where, labels = problem(positions=400, supervised=300)
    ids = torch.tensor([4, 30, 49])
    found = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        rows = torch.randn(3, 24, generator=torch.Generator().manual_seed(5)).requires_grad_()
        result = loss_and_gradient(lambda *given, f=function, r=rows: f(*given, ids, r), hidden, head, where, labels)
        found.append((*result, rows.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
