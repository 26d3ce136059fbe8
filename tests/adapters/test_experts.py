"""LoRA on routed experts: PEFT's parameters and files, grouped products, the gradients of a loop over experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expert_toys import (
    ATTENTION,
    EXPERT_PARAMETERS,
    TOYS,
    Noted,
    adapted,
    distance,
    fp8_and_its_twin,
    loss_and_gradients,
    token_ids,
)
from peft import LoraConfig, PeftModel, get_peft_model

from shardtune.adapters import experts
from shardtune.adapters.experts import use_grouped_products
from shardtune.errors import ShardtuneError
from shardtune.model.experts import use_expert_loops
from shardtune.model.quantized import use_fp8_storage

# PEFT applies a rank_pattern to expert parameters and then warns that it matched no module.
pytestmark = pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")


def assert_same(mine: tuple, theirs: tuple, tolerance: float) -> None:
    (loss, gradients), (their_loss, their_gradients) = mine, theirs
    assert abs(loss - their_loss) < tolerance * their_loss
    assert gradients.keys() == their_gradients.keys() and any("experts" in name for name in gradients)
    for name, gradient in gradients.items():
        assert their_gradients[name].norm() > 0
        assert distance(gradient, their_gradients[name]) < tolerance, name


@pytest.mark.parametrize("parameters", [EXPERT_PARAMETERS, EXPERT_PARAMETERS[:1], EXPERT_PARAMETERS[1:]])
@pytest.mark.parametrize("kind", TOYS)
def test_loss_and_gradients_equal_pefts_and_the_loops(kind: str, parameters: list[str]) -> None:
    model = adapted(TOYS[kind](), ATTENTION[kind], parameters)
    names = {name for name, _ in model.named_parameters()}
    pefts = loss_and_gradients(model, token_ids())
    assert use_grouped_products(model) == 2 * len(parameters)
    assert {name for name, _ in model.named_parameters()} == names
    grouped = loss_and_gradients(model, token_ids())
    assert use_expert_loops(model, compiled=False) == 2
    with Noted() as noted:
        loops = loss_and_gradients(model, token_ids())
    assert not [name for name in noted.names if "grouped" in name]
    assert_same(grouped, pefts, 1e-5)
    assert_same(grouped, loops, 1e-5)


def test_pefts_own_forward_is_no_longer_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(TOYS["mixtral"](), ATTENTION["mixtral"])
    use_grouped_products(model)

    def never(*_: object) -> None:
        raise AssertionError("a delta of all experts was made")

    for name in ("get_delta_weight", "get_delta_factors", "_activate_lora"):
        monkeypatch.setattr(experts.ParamWrapper, name, never)
    _, gradients = loss_and_gradients(model, token_ids())
    assert gradients


@pytest.mark.parametrize("kind", TOYS)
def test_a_bf16_base_under_float32_adapters_stays_within_rounding(kind: str) -> None:
    exact = adapted(TOYS[kind](), ATTENTION[kind])
    use_grouped_products(exact)
    model = adapted(TOYS[kind]().bfloat16(), ATTENTION[kind])
    use_grouped_products(model)
    loss, gradients = loss_and_gradients(model, token_ids())
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    # One token that a rounded router sends elsewhere moves a toy's gradients more than rounding does: the loss, tightly.
    assert abs(loss - loss_and_gradients(exact, token_ids())[0]) < 0.03
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in gradients.values())


@pytest.mark.parametrize("kind", TOYS)
def test_on_an_fp8_base_loss_and_gradients_equal_those_on_the_dequantised_one(kind: str) -> None:
    results = []
    for base in fp8_and_its_twin(kind, torch.float32):
        model = adapted(base, ATTENTION[kind])
        use_grouped_products(model)
        results.append(loss_and_gradients(model, token_ids()))
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert_same(results[0], results[1], 1e-5)


@pytest.mark.parametrize("held", [False, True], ids=["plain", "fp8"])
def test_without_its_adapters_the_model_is_the_base_model(held: bool) -> None:
    base, other = fp8_and_its_twin("mistral4", torch.float32) if held else (TOYS["mistral4"](), TOYS["mistral4"]())
    model = adapted(base, ATTENTION["mistral4"])
    use_grouped_products(model)
    model.eval()
    with torch.no_grad():
        expected = other(token_ids()).logits
        with model.disable_adapter():
            off = model(token_ids()).logits
        on = model(token_ids()).logits
    assert distance(off, expected) < 1e-5
    assert distance(on, expected) > 1e-2


@pytest.mark.parametrize("kind", TOYS)
def test_plain_peft_loads_the_saved_adapter_and_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = adapted(TOYS[kind](), ATTENTION[kind])
    use_grouped_products(model)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    loss_and_gradients(model, token_ids())
    optimizer.step()
    with torch.no_grad():
        live = model(token_ids()).logits
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(TOYS[kind](), tmp_path)
    assert not any(isinstance(m, experts.GroupedParamWrapper) for m in loaded.modules())
    with torch.no_grad():
        assert distance(loaded(token_ids()).logits, live) < 1e-5


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = adapted(fp8_and_its_twin("mistral4", torch.float32)[0], ATTENTION["mistral4"])
    use_grouped_products(model)
    plain = loss_and_gradients(model.train(), token_ids())
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(loss_and_gradients(model, token_ids()), plain, 1e-6)


def test_two_active_adapters_add_up_as_in_peft() -> None:
    model = adapted(TOYS["mixtral"](), ATTENTION["mixtral"])
    use_grouped_products(model)
    second = LoraConfig(
        r=4, lora_alpha=4, lora_dropout=0.0, target_modules=ATTENTION["mixtral"], target_parameters=EXPERT_PARAMETERS,
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    grouped = loss_and_gradients(model, token_ids())
    for module in model.modules():
        if isinstance(module, experts.GroupedParamWrapper):
            module.__class__ = experts.ParamWrapper
    assert_same(grouped, loss_and_gradients(model, token_ids()), 1e-5)


def test_merging_is_pefts_and_refused_where_the_base_is_codes() -> None:
    model = adapted(TOYS["mixtral"](), ATTENTION["mixtral"])
    use_grouped_products(model)
    with torch.no_grad():
        apart = model(token_ids()).logits
        model.merge_adapter()
        assert distance(model(token_ids()).logits, apart) < 1e-5
    name = "model.layers.0.mlp.experts.down_proj"
    base = TOYS["mixtral"]()
    use_fp8_storage(base, {name: (1, 24)})
    held = adapted(base, ATTENTION["mixtral"])
    use_grouped_products(held)
    with pytest.raises(ShardtuneError, match="down_proj while it is held in FP8"):
        held.merge_adapter()


def test_experts_of_another_layout_are_refused_by_class() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=72, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"], lora_dropout=0.0)
    with pytest.raises(ShardtuneError, match="GptOssExperts"):
        use_grouped_products(get_peft_model(GptOssForCausalLM(config), lora))


def test_adapters_elsewhere_are_left_alone() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], lora_dropout=0.0)
    model = get_peft_model(TOYS["mixtral"](), lora)
    assert use_grouped_products(model) == 0
    assert not any(isinstance(m, experts.GroupedParamWrapper) for m in model.modules())
