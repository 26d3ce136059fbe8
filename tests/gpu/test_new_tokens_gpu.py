"""The fused loss with rows of new tokens, on a GPU, against its eager twin."""

from __future__ import annotations

import pytest
import torch

from shardtune.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from shardtune.train.losses.nll import LOSS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients_with_rows_that_stand_in_are_the_twins(dtype: torch.dtype, error: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, head, rows = (
        (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)
        for shape, scale in (((3000, 512), 0.5), ((32003, 512), 0.05), ((3, 512), 0.05))
    )
    where = torch.arange(2500, device="cuda")
    labels = torch.randint(32003, (2500,), device="cuda", generator=generator)
    labels[:300] = 32001
    ids = torch.tensor([7, 32001, 32002], device="cuda")
    found = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        own = [hidden.clone().requires_grad_(), rows.clone().requires_grad_()]
        loss, _ = function(own[0], head, where, labels, LOSS, ids, own[1])
        loss.backward()
        found.append([loss.detach(), *(tensor.grad for tensor in own)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() <= error * theirs.float().norm()
