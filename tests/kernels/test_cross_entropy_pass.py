"""The Triton pass over logits against its twin: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from shardtune.kernels import cross_entropy
from shardtune.train.losses import dft, nll
from shardtune.train.losses.label_smoothing import smoothed_nll

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = 7
LOSSES = {"nll": nll.LOSS, "dft": dft.LOSS, "smoothed": smoothed_nll(0.2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 1000, 8192, 20000])
@pytest.mark.parametrize("token_loss", LOSSES.values(), ids=list(LOSSES))
def test_loss_token_stats_and_gradient_are_the_twins(
    columns: int, dtype: torch.dtype, token_loss: cross_entropy.TokenLoss
) -> None:
    from shardtune.kernels.cross_entropy_pass import loss_and_gradient

    drawn = torch.Generator().manual_seed(columns)
    logits = (torch.randn(ROWS, columns, generator=drawn) * 4).to(dtype)
    labels = torch.randint(columns, (ROWS,), generator=drawn)
    labels[0], labels[1] = 0, columns - 1
    labels[2] = logits[2].float().argmax()  # one that is right
    logits[3] += 300  # far from zero, where exp alone overflows
    meant_loss, meant_stats, meant = cross_entropy.loss_and_gradient(logits.clone(), labels, token_loss)
    there = logits.to(DEVICE)
    loss, token_stats, gradient = loss_and_gradient(there, labels.to(DEVICE), token_loss)
    assert gradient.data_ptr() == there.data_ptr() and gradient.dtype == dtype
    torch.testing.assert_close(loss.cpu(), meant_loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(token_stats.cpu(), meant_stats, rtol=1e-4, atol=1e-3)
    far = (gradient.cpu().double() - meant.double()).norm() / meant.double().norm()
    # The interpreter cuts a bfloat16 off instead of rounding it.
    assert far < (2e-6 if dtype == torch.float32 else 2e-3 if ON_GPU else 1e-2)


def test_a_logit_that_is_nan_makes_the_loss_nan() -> None:
    from shardtune.kernels.cross_entropy_pass import loss_and_gradient

    logits = torch.zeros(2, 100, device=DEVICE)
    logits[1, 7] = float("nan")
    loss, _, gradient = loss_and_gradient(logits, torch.tensor([1, 2], device=DEVICE), nll.LOSS)
    assert loss.isnan() and gradient[1].isnan().all() and not gradient[0].isnan().any()


def test_no_rows_are_no_loss() -> None:
    from shardtune.kernels.cross_entropy_pass import loss_and_gradient

    labels = torch.zeros(0, dtype=torch.long, device=DEVICE)
    loss, token_stats, gradient = loss_and_gradient(torch.zeros(0, 100, device=DEVICE), labels, nll.LOSS)
    assert loss == 0 and token_stats.tolist() == [0, 0] and gradient.shape == (0, 100)
