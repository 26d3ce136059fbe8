"""Frozen experts as grouped products against transformers' own forward: the same numbers, the same parameters."""

from __future__ import annotations

import expert_toys
import pytest
import torch
from expert_toys import ATTENTION, TOYS, Noted, distance, fp8_and_its_twin, loss_and_gradients, token_ids
from peft import LoraConfig, get_peft_model
from torch import Tensor
from toys import toy_text_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardtune.model.experts import GroupedExperts, fused_experts, grouped_class, use_expert_loops, use_grouped_experts


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of everything that is not frozen, and the loss."""
    loss = model(token_ids(), labels=token_ids()).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def adapted(kind: str, *, grouped: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=ATTENTION[kind], init_lora_weights=False)
    model = get_peft_model(TOYS[kind](), config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.requires_grad_()  # what reaches the router shows too
    if grouped:
        assert use_grouped_experts(model) == (2, 2)
    return model


@pytest.mark.parametrize("kind", list(TOYS))
def test_loss_and_gradients_are_those_of_transformers_own_experts(kind: str) -> None:
    mine, meant = gradients(adapted(kind, grouped=True)), gradients(adapted(kind, grouped=False))
    assert mine.keys() == meant.keys() and any("mlp.gate" in name for name in mine) and len(mine) > 8
    assert {name: distance(mine[name], meant[name]) for name in meant if distance(mine[name], meant[name]) > 1e-5} == {}


@pytest.mark.parametrize("kind", list(TOYS))
def test_nothing_is_added_at_indices_in_either_direction(kind: str) -> None:
    model = adapted(kind, grouped=True)
    with Noted() as noted:
        gradients(model)
    assert noted.names.count("shardtune::grouped_linear") == 4  # two layers, two weights
    assert not {"aten::index_add", "aten::index_add_", "aten::index_put", "aten::index_put_"} & set(noted.names)
    assert "aten::_index_put_impl_" not in noted.names and "aten::index" in noted.names  # rows are only picked


def test_parameters_keep_their_names_and_all_layers_one_class() -> None:
    model = TOYS["mistral4"]()
    before = list(model.state_dict())
    assert use_grouped_experts(model) == (2, 2) == use_grouped_experts(model)
    kinds = {type(experts) for experts in fused_experts(model)}
    assert len(kinds) == 1 and issubclass(kinds.pop(), GroupedExperts) and list(model.state_dict()) == before


def test_experts_of_another_layout_stay_as_they_are() -> None:
    model = TOYS["mixtral"]()
    other = fused_experts(model)[1]
    other.has_bias = True
    assert use_grouped_experts(model) == (1, 2) and not isinstance(other, GroupedExperts)


def test_a_dense_model_has_none() -> None:
    model = AutoModelForCausalLM.from_config(toy_text_config("llama"))
    assert use_grouped_experts(model) == (0, 0)


@pytest.mark.parametrize("kind", list(TOYS))
def test_loops_over_experts_in_fp8_mean_the_same(kind: str) -> None:
    held = expert_toys.adapted(fp8_and_its_twin(kind, torch.float32)[0], ATTENTION[kind], [])
    grouped = loss_and_gradients(held, token_ids())
    assert use_expert_loops(held, compiled=False) == 2
    with Noted() as noted:
        loss, found = loss_and_gradients(held, token_ids())
    assert not [name for name in noted.names if "grouped" in name]
    assert abs(loss - grouped[0]) < 1e-5 and found.keys() == grouped[1].keys()
    assert all(distance(found[name], gradient) < 1e-5 for name, gradient in grouped[1].items())


def test_a_compiled_layer_steps_out_for_its_loop() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = adapted("mixtral", grouped=False)
    for experts in fused_experts(model):
        experts.__class__ = grouped_class(type(experts), GroupedExperts)
    meant = gradients(model)
    model.zero_grad()
    assert use_expert_loops(model, compiled=True) == 2
    for layer in model.get_base_model().model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    mine = gradients(model)
    assert any("routed_experts_reference" in why for why in torch._dynamo.utils.counters["graph_break"])
    assert all(distance(mine[name], meant[name]) < 1e-5 for name in meant)
