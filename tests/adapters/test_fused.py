"""Which layers take the fused operator, and that PEFT still knows them."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from toys import toy_text_config
from transformers import LlamaForCausalLM

from shardtune.adapters.fused import FusedLoraLinear, use_fused_lora


def adapted(**changes: object):
    torch.manual_seed(0)
    model = LlamaForCausalLM(toy_text_config("llama"))
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **changes}
    return get_peft_model(model, LoraConfig(**settings))


IDS = torch.arange(5, 25)[None]


def test_the_model_computes_the_same_with_and_without_adapters() -> None:
    model = adapted().eval()
    with torch.no_grad():
        meant = model(IDS).logits
        with model.disable_adapter():
            bare = model(IDS).logits
        assert use_fused_lora(model) == (4, 4)
        assert torch.allclose(model(IDS).logits, meant, atol=1e-6) and not torch.allclose(meant, bare, atol=1e-3)
        with model.disable_adapter():
            assert torch.equal(model(IDS).logits, bare)


def test_a_merged_adapter_is_not_added_twice() -> None:
    model = adapted().eval()
    use_fused_lora(model)
    with torch.no_grad():
        meant = model(IDS).logits
        model.merge_adapter()
        assert torch.allclose(model(IDS).logits, meant, atol=1e-5)


def test_dropout_acts_on_the_adapter_alone() -> None:
    model = adapted(lora_dropout=0.5)
    use_fused_lora(model)
    layer = next(module for module in model.modules() if isinstance(module, FusedLoraLinear))
    x = torch.randn(3, layer.in_features)
    torch.manual_seed(7)
    got = layer.train()(x)
    torch.manual_seed(7)
    dropped = torch.nn.functional.dropout(x, 0.5)
    low = layer.lora_B["default"](layer.lora_A["default"](dropped)) * layer.scaling["default"]
    assert torch.allclose(got, layer.base_layer(x) + low, atol=1e-6)


def test_what_is_not_plain_lora_keeps_pefts_own_forward() -> None:
    model = adapted(use_dora=True)
    assert use_fused_lora(model) == (0, 4)


def test_a_second_adapter_that_is_made_active_is_the_one_that_counts() -> None:
    model = adapted().eval()
    use_fused_lora(model)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("other")
    with torch.no_grad():
        other = model(IDS).logits
        model.set_adapter("default")
        assert not torch.allclose(model(IDS).logits, other, atol=1e-4)
