"""The routers' auxiliary loss beside the fused one, and which models have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resolving import resolved_for
from support.twins import any_config, toy
from toys import mixtral_config, toy_text_config

from shardtune.data.collate import SUPERVISED, TARGETS
from shardtune.errors import UserInputError
from shardtune.model.families.registry import family_of
from shardtune.model.model_outline import outline_of
from shardtune.model.outline import Outline
from shardtune.plan.gather import loss_obstacle, router_coefficient
from shardtune.train.losses import Loss, nll
from shardtune.train.losses.fused import use_fused_loss


@pytest.mark.parametrize("recomputed", ["no", "full", "selective"])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_and_recomputed_layers_give_the_same_loss_and_gradients(
    recomputed: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MixtralForCausalLM

    from shardtune.model.experts import use_grouped_experts
    from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing
    from shardtune.parallel.shard import compile_layers

    monkeypatch.setattr(torch, "compile", lambda f: COMPILE(f, backend="aot_eager"))
    found = {}
    for fused in (False, True):
        torch.manual_seed(0)
        model = MixtralForCausalLM(mixtral_config()).train()
        use_grouped_experts(model)
        ids = torch.arange(5, 45)[None]
        where = torch.arange(0, 39)
        if not fused:
            out = model(input_ids=ids, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(out.logits[0, where], ids[0, where + 1], reduction="sum")
        else:
            use_fused_loss(model, causal=True, router_coefficient=1.0)
            layers = list(model.model.layers)
            if recomputed == "selective":
                apply_selective_checkpointing(layers)
            if compiled:
                compile_layers(layers)
            if recomputed == "full":
                model.gradient_checkpointing_enable({"use_reentrant": False})
            batch = {SUPERVISED: where, TARGETS: ids[0, where + 1]}
            out = Loss(nll.LOSS, 1.0, fused=True)(model, {"input_ids": ids, **batch})
            loss = out.loss
        (loss + 10 * out.aux_loss).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[fused] = (loss.item(), out.aux_loss.item(), gradients["model.layers.0.mlp.gate.weight"])
        # What a layer computes again for its backward pass must not be held until the next step.
        assert all(getattr(layer.mlp.gate, "kept_logits", None) is None for layer in model.model.layers)
    assert found[True][:2] == pytest.approx(found[False][:2], rel=1e-5)
    torch.testing.assert_close(found[True][2], found[False][2], rtol=1e-4, atol=1e-6)


COMPILE: Callable[..., Any] = torch.compile


def outline(model: Any) -> Outline:
    return outline_of(model, family_of(model))


def test_where_a_model_has_a_way_of_its_own_or_none_it_is_said() -> None:
    from transformers import AutoModelForCausalLM

    doge = outline(AutoModelForCausalLM.from_config(toy_text_config("doge", num_experts=4, is_moe=True)))
    assert doge.router_loss == "own"
    fusible = replace(doge, family=replace(doge.family, proven=frozenset({"fused_loss"})))
    assert "in a way of its own" in (loss_obstacle(fusible, 0.1) or "") and loss_obstacle(fusible) is None
    llama = outline(AutoModelForCausalLM.from_config(toy_text_config("llama")))
    assert router_coefficient(llama, None) == 0
    with pytest.raises(UserInputError, match="has no auxiliary loss"):
        router_coefficient(llama, 0.1)
    mixtral = outline(AutoModelForCausalLM.from_config(mixtral_config(router_aux_loss_coef=0.25)))
    assert router_coefficient(mixtral, None) == 0.25 and router_coefficient(mixtral, 0.0) == 0


def test_a_config_with_a_coefficient_is_no_auxiliary_loss_where_the_forward_computes_none(tmp_path: Path) -> None:
    from transformers import Llama4ForCausalLM

    model = Llama4ForCausalLM(toy_text_config("llama4_text"))
    assert model.config.router_aux_loss_coef > 0
    assert model(torch.arange(5, 15)[None], output_router_logits=True).get("aux_loss") is None
    notices = [notice.text for notice in resolved_for(any_config(tmp_path), model).notices]
    assert any("Llama4ForCausalLM computes no auxiliary loss" in text for text in notices)
    assert not resolved_for(any_config(tmp_path), toy("llama")).notices
    with pytest.raises(UserInputError, match="has no auxiliary loss"):
        router_coefficient(outline(model), 0.1)
