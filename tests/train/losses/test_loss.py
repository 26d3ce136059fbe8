"""The loss of a batch through a model: the fused forward against the eager one, and what evaluation reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.twins import adapted, batch_of, differences, documents, move, toy

from shardtune.adapters.lora import add_lora
from shardtune.config.schema import LoraSection, TrainSection
from shardtune.model.families.registry import family_of
from shardtune.train.losses import Loss, LossOutput, build_loss

OBJECTIVES: dict[str, dict[str, Any]] = {
    "nll": {},
    "dft": {"loss": "dft"},
    "smoothed": {"label_smoothing_factor": 0.2},
}
COEFFICIENT = 0.3


def built(kind: str, *, fused: bool, new_tokens: tuple[int, ...] = (), **train: Any) -> tuple[Any, Loss]:
    base = toy(kind)
    train = {**({"router_aux_loss_coef": COEFFICIENT} if kind == "qwen3_moe" else {}), **train}
    if new_tokens:
        section = LoraSection(r=2, lora_alpha=4, lora_dropout=0.0)
        model = move(add_lora(base, section, None, new_tokens)[0])
    else:
        model = adapted(base)
    return model.train(), build_loss(TrainSection(fused_loss=fused, **train), base, family_of(base))


def numbers(model: Any, output: LossOutput, coefficient: float) -> dict[str, torch.Tensor]:
    total = output.loss if output.aux_loss is None else output.loss + coefficient * output.aux_loss
    total.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    aux = {} if output.aux_loss is None else {"aux_loss": output.aux_loss.detach()}
    return {"loss": output.loss.detach(), "token_stats": output.token_stats, **aux, **found}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("kind", "layout", "new_tokens"),
    [("llama", "packed", ()), ("llama", "padded", (7, 30)), ("qwen3_moe", "padded", ())],
    ids=["llama", "llama-new-tokens", "qwen3_moe"],
)
def test_fused_and_eager_agree_in_loss_token_stats_routers_loss_and_every_gradient(
    kind: str, layout: str, new_tokens: tuple[int, ...], objective: str
) -> None:
    one, two, three, four = documents()
    rows = [[one, two], [three, four]] if layout == "packed" else [[row] for row in (one, two, three, four)]
    found = []
    for fused in (True, False):
        model, loss = built(kind, fused=fused, new_tokens=new_tokens, **OBJECTIVES[objective])
        output = loss(model, batch_of(layout, rows))
        assert loss.router_coefficient == (COEFFICIENT if kind == "qwen3_moe" else 0.0)
        assert (output.aux_loss is not None) is (kind == "qwen3_moe")
        assert not output.token_stats.requires_grad and output.loss.dtype == torch.float32
        # Weighted so that the routers' part of the gradients is not lost in rounding.
        found.append(numbers(model, output, 20.0))
    assert differences(*found) == {}


@pytest.mark.parametrize("fused", [True, False])
def test_evaluation_is_the_negative_log_likelihood_whatever_is_trained(fused: bool) -> None:
    batch = batch_of("padded", [[one] for one in documents()])
    model, plain = built("qwen3_moe", fused=fused, router_aux_loss_coef=0.0)
    meant = plain(model, batch)
    assert plain.router_coefficient == 0.0 and plain.description is None and meant.aux_loss is None
    for objective in ({"loss": "dft"}, {"label_smoothing_factor": 0.2}):
        model, loss = built("qwen3_moe", fused=fused, **objective)
        assert "0.3 × the routers' auxiliary loss" in str(loss.description)
        with torch.no_grad():
            trained, measured = loss(model, batch), loss.evaluate(model, batch)
        assert measured.aux_loss is None and trained.aux_loss is not None
        assert measured.loss.item() == pytest.approx(meant.loss.item(), rel=1e-6)
        assert abs(trained.loss.item() / meant.loss.item() - 1) > 0.01
        assert torch.equal(measured.token_stats, meant.token_stats)


@pytest.mark.parametrize("fused", [True, False])
def test_the_models_own_code_sees_no_keyword_of_ours_and_the_batch_is_left_as_it_was(fused: bool) -> None:
    model, loss = built("llama", fused=fused)
    base, seen, labels = model.get_base_model(), set(), []
    base.register_forward_pre_hook(lambda _m, _a, kwargs: labels.append(kwargs["labels"]), with_kwargs=True)
    for module in (base.model, *base.model.layers):
        module.register_forward_pre_hook(lambda _m, _a, kwargs: seen.update(kwargs), with_kwargs=True)
    batch = batch_of("padded", [[one] for one in documents()])
    names = set(batch)
    loss(model, batch)
    assert labels == [None]  # with labels a model computes a loss of its own as well
    assert seen and not seen & {"labels", "supervised", "targets", "token_loss"}
    assert set(batch) == names
