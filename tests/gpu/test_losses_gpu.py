"""Every loss fused on a GPU, by the Triton kernel, against its eager form there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardtune.kernels.cross_entropy import TokenLoss, linear_cross_entropy, linear_cross_entropy_reference
from shardtune.train.losses import dft, nll
from shardtune.train.losses.label_smoothing import smoothed_nll

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LOSSES = {"nll": nll.LOSS, "dft": dft.LOSS, "smoothed": smoothed_nll(0.2)}
POSITIONS, SUPERVISED, SIZE, VOCABULARY = 1500, 1100, 256, 50_001  # an odd number, and more than one chunk's columns


def problem(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    head = drawn(VOCABULARY, SIZE) * 0.2
    where = torch.randperm(POSITIONS, device="cuda", generator=generator)[:SUPERVISED].sort().values
    labels = torch.randint(VOCABULARY, (SUPERVISED,), device="cuda", generator=generator)
    hidden = drawn(POSITIONS, SIZE)
    hidden[where[:800]] += head[labels[:800]] * 1.5  # some predictions are right
    ids = torch.tensor([7, 400, VOCABULARY - 1], device="cuda")
    return {"hidden": hidden, "head": head, "where": where, "labels": labels, "ids": ids, "rows": drawn(3, SIZE) * 0.2}


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("token_loss", LOSSES.values(), ids=list(LOSSES))
def test_loss_token_stats_and_gradients_are_those_of_the_eager_form(
    token_loss: TokenLoss, dtype: torch.dtype, allowed: float
) -> None:
    found = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        given = problem(dtype)
        hidden, rows = given["hidden"].requires_grad_(), given["rows"].float().requires_grad_()
        loss, token_stats = function(**{**given, "hidden": hidden, "rows": rows}, token_loss=token_loss)
        (loss / SUPERVISED).backward()
        found.append({"loss": loss.detach(), "token_stats": token_stats, "hidden": hidden.grad, "rows": rows.grad})
    ours, meant = found
    assert 0 < meant["token_stats"][1] < SUPERVISED
    far = {name: ((ours[name] - meant[name]).norm() / meant[name].norm()).item() for name in meant}
    assert {name: error for name, error in far.items() if not error <= allowed} == {}
