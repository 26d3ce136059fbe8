"""Head and loss together, against the logits written out, for every loss there is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardtune.kernels import cross_entropy
from shardtune.kernels.cross_entropy import TokenLoss, linear_cross_entropy, linear_cross_entropy_reference
from shardtune.train.losses import dft, nll
from shardtune.train.losses.label_smoothing import smoothed_nll

LOSSES = {"nll": nll.LOSS, "dft": dft.LOSS, "smoothed": smoothed_nll(0.2)}
every_loss = pytest.mark.parametrize("token_loss", LOSSES.values(), ids=list(LOSSES))


def problem(positions: int = 40, size: int = 24, vocabulary: int = 50, supervised: int = 17) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(positions, size, generator=generator)
    head = torch.randn(vocabulary, size, generator=generator)
    where = torch.randperm(positions, generator=generator)[:supervised].sort().values
    return hidden, head, where, torch.randint(vocabulary, (supervised,), generator=generator)


def loss_and_gradient(function: object, hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    own = hidden.clone().requires_grad_()
    loss, token_stats = function(own, *rest)  # type: ignore[operator]
    (loss * 0.3).backward()
    return loss.detach(), token_stats, own.grad


@every_loss
@pytest.mark.parametrize("rows_at_once", [1, 8, 1000])
def test_loss_gradient_entropy_and_accuracy_are_those_of_the_logits(
    rows_at_once: int, token_loss: TokenLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*problem(positions=400, supervised=300), token_loss)
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", rows_at_once * 50 * 4)
    got = loss_and_gradient(linear_cross_entropy, *given)
    meant = loss_and_gradient(linear_cross_entropy_reference, *given)
    for ours, theirs in zip(got, meant, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert 0 < got[1][1] < 300  # some are right, not all: the count means something


def test_positions_that_predict_nothing_get_no_gradient() -> None:
    hidden, head, where, labels = problem()
    _, _, gradient = loss_and_gradient(linear_cross_entropy, hidden, head, where, labels, nll.LOSS)
    silent = torch.ones(len(hidden), dtype=torch.bool)
    silent[where] = False
    assert not gradient[silent].any() and gradient[where].any(dim=-1).all()


@every_loss
def test_a_batch_without_a_supervised_token_has_the_loss_zero_and_still_a_gradient(token_loss: TokenLoss) -> None:
    hidden, head, _, _ = problem()
    nothing = torch.empty(0, dtype=torch.int64)
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        loss, token_stats, gradient = loss_and_gradient(function, hidden, head, nothing, nothing, token_loss)
        assert loss == 0 and not token_stats.any() and not gradient.any()


@every_loss
def test_large_logits_do_not_overflow(token_loss: TokenLoss) -> None:
    hidden, head, where, labels = problem()
    got = loss_and_gradient(linear_cross_entropy, hidden * 1e4, head, where, labels, token_loss)
    meant = loss_and_gradient(linear_cross_entropy_reference, hidden * 1e4, head, where, labels, token_loss)
    assert torch.isfinite(got[0]) and torch.allclose(got[0], meant[0], rtol=1e-5)
    assert torch.allclose(got[2], meant[2], rtol=1e-4, atol=1e-5)


@every_loss
def test_the_loss_of_a_token_that_is_all_but_certain_is_exact(token_loss: TokenLoss) -> None:
    logits = torch.zeros(1, 50)
    logits[0, 3] = 1000.0 + 10.0
    logits[0, 4:] = 1000.0
    label = torch.tensor([3])
    loss, _, _ = cross_entropy.loss_and_gradient(logits.clone(), label, token_loss)
    meant = token_loss.eager(logits.double(), label, token_loss.factor)
    assert loss.item() == pytest.approx(meant.item(), rel=1e-3)


@every_loss
@pytest.mark.parametrize("rows_at_once", [8, 1000])
def test_rows_that_stand_in_for_some_of_the_head_train_and_the_others_count_as_before(
    rows_at_once: int, token_loss: TokenLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", rows_at_once * 50 * 4)
    hidden, head, where, labels = problem(positions=400, supervised=300)
    ids = torch.tensor([4, 30, 49])
    found = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        rows = torch.randn(3, 24, generator=torch.Generator().manual_seed(5)).requires_grad_()
        result = loss_and_gradient(function, hidden, head, where, labels, token_loss, ids, rows)
        found.append((*result, rows.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
