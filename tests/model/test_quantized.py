"""A base held in FP8: codes and scales in place of weights, the same model within nothing but the order of additions."""

from __future__ import annotations

import pytest
import torch
from expert_toys import ATTENTION, TOYS, adapted, distance, fp8_and_its_twin, token_ids, toy_blocks, toy_mistral4
from torch import nn

from shardtune.errors import ShardtuneError
from shardtune.kernels import fp8
from shardtune.model.quantized import Fp8Experts, Fp8Linear, fp8_candidates, use_fp8_storage


@pytest.mark.parametrize("kind", TOYS)
def test_a_model_on_meta_gets_codes_and_scales_under_the_names_of_checkpoints(kind: str) -> None:
    with torch.device("meta"):
        model = TOYS[kind]()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    blocks = toy_blocks(model)
    use_fp8_storage(model, blocks)
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(shapes) | {f"{name}_scale_inv" for name in blocks}
    for name, block in blocks.items():
        codes, scale = parameters[name], parameters[f"{name}_scale_inv"]
        assert (codes.shape, codes.dtype, codes.requires_grad) == (shapes[name], fp8.CODES, False)
        assert (scale.dtype, scale.requires_grad) == (torch.float32, False)
        assert tuple(scale.shape) == fp8.scale_shape(shapes[name], block) and scale.dim() >= 2
        assert codes.device.type == scale.device.type == "meta"


def test_candidates_are_all_matrices_of_the_layers_but_the_router() -> None:
    model = toy_mistral4()
    names = fp8_candidates(model)
    rest = {name for name, p in model.named_parameters() if p.dim() > 1} - set(names)
    assert rest == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        *(f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)),
    }
    assert "model.layers.1.mlp.experts.down_proj" in names and len(names) == 2 * 10


def test_a_router_that_is_a_linear_layer_is_no_candidate() -> None:
    model = toy_mistral4()
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(32, 6)
        layer.mlp.other = nn.Linear(32, 64)
    names = fp8_candidates(model, excluded=["mlp.shared_experts.up_proj"])
    assert "model.layers.0.mlp.other.weight" in names
    assert "model.layers.0.mlp.gate.weight" not in names
    assert "model.layers.0.mlp.shared_experts.up_proj.weight" not in names


def test_expert_scales_count_as_computed_by_hand() -> None:
    # One token to expert 2 alone. Codes are 1 everywhere, so each product is a sum over 32 (24) inputs times a scale.
    model = toy_mistral4()
    experts = model.model.layers[0].mlp.experts
    blocks = {f"model.layers.0.mlp.experts.{n}": (w.shape[1], w.shape[2]) for n, w in experts.named_parameters()}
    use_fp8_storage(model, blocks)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(experts, name).copy_(torch.ones(getattr(experts, name).shape).to(fp8.CODES))
        experts.gate_up_proj_scale_inv.copy_(torch.tensor([9.0, 9, 0.125, 9, 9, 9]).view(6, 1, 1))
        experts.down_proj_scale_inv.copy_(torch.tensor([9.0, 9, 0.5, 9, 9, 9]).view(6, 1, 1))
    experts.act_fn = nn.Identity()
    y = experts(torch.ones(1, 32), torch.tensor([[2]]), torch.tensor([[0.25]]))
    # gate = up = 32 · 0.125 = 4, their product 16, down 24 · 16 · 0.5 = 192, the router's quarter 48.
    assert y.tolist() == [[48.0] * 32]


@pytest.mark.parametrize("kind", TOYS)
def test_logits_equal_those_of_the_dequantised_model(kind: str) -> None:
    held, twin = fp8_and_its_twin(kind, torch.float32)
    with torch.no_grad():
        mine, theirs, full = held(token_ids()).logits, twin(token_ids()).logits, TOYS[kind]()(token_ids()).logits
    assert distance(mine, theirs) < 1e-5
    assert distance(mine, full) > 1e-3  # quantisation did something, so the two were not compared with themselves


def test_one_expert_weight_may_be_held_alone() -> None:
    full, part = toy_mistral4(), toy_mistral4()
    name = "model.layers.0.mlp.experts.down_proj"
    use_fp8_storage(part, {name: (1, 24)})
    codes, scale = fp8.quantize_rows(full.get_parameter(name).detach())
    with torch.no_grad():
        part.get_parameter(name).copy_(codes)
        part.get_parameter(name + "_scale_inv").copy_(scale)
        full.get_parameter(name).copy_(fp8.dequantize(codes, scale, (1, 24), torch.float32))
        assert distance(part(token_ids()).logits, full(token_ids()).logits) < 1e-5


def test_experts_of_all_layers_are_of_one_class() -> None:
    # Compiled code is shared by layers that are alike, down to the classes of their parts.
    model = toy_mistral4()
    use_fp8_storage(model, toy_blocks(model))
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert isinstance(first, Fp8Experts) and type(first) is type(second)


def test_a_weight_nobody_filled_shows_as_nan() -> None:
    model = toy_mistral4()
    use_fp8_storage(model, {"model.layers.1.self_attn.o_proj.weight": (128, 128)})
    assert model(token_ids()).logits.isnan().all()


def test_adapters_beside_fp8_weights_are_float32_and_linear_ones_never_went_through_float8() -> None:
    held, _ = fp8_and_its_twin("mistral4", torch.bfloat16)
    torch.manual_seed(0)
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(held, LoraConfig(r=4, target_modules=ATTENTION["mistral4"], lora_dropout=0.0))
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert factors and {p.dtype for p in factors.values()} == {torch.float32}
    a = next(p for n, p in factors.items() if "lora_A" in n)
    assert not torch.equal(a, a.to(fp8.CODES).float())


def test_adapters_on_a_meta_model_held_in_fp8_are_float32_on_meta() -> None:
    with torch.device("meta"):
        model = toy_mistral4()
    use_fp8_storage(model, toy_blocks(model))
    factors = [p for p in adapted(model, ATTENTION["mistral4"]).parameters() if p.requires_grad]
    assert {(p.dtype, p.device.type) for p in factors} == {(torch.float32, "meta")}


def test_codes_that_were_cast_are_refused_and_not_taken_for_values() -> None:
    held, _ = fp8_and_its_twin("mistral4", torch.float32)
    linear = held.model.layers[0].self_attn.o_proj
    assert isinstance(linear, Fp8Linear)
    linear.weight.data = linear.weight.data.bfloat16()
    with pytest.raises(ShardtuneError, match=r"arrived as torch\.bfloat16"):
        linear(torch.ones(1, linear.in_features))
    experts = held.model.layers[0].mlp.experts
    experts.down_proj_scale_inv.data = experts.down_proj_scale_inv.data.bfloat16()
    with pytest.raises(ShardtuneError, match=r"Experts\.down_proj .* torch.bfloat16 scales"):
        experts(torch.ones(1, 32), torch.tensor([[2]]), torch.tensor([[0.25]]))


@pytest.mark.parametrize(
    ("name", "block", "message"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (1, 1), "no parameter model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.0.nothing.weight", (1, 1), "no parameter model.layers.0.nothing.weight"),
        ("model.layers.0.input_layernorm.weight", (1, 1), r"shape \(32,\)"),
        ("model.layers.0.self_attn.o_proj.weight", (0, 8), "0 × 8"),
        ("model.layers.0.mlp.gate.weight", (1, 1), "cannot be held in FP8"),
        ("model.embed_tokens.weight", (1, 1), "cannot be held in FP8"),
    ],
)
def test_what_cannot_be_held_is_named(name: str, block: tuple[int, int], message: str) -> None:
    with pytest.raises(ShardtuneError, match=message):
        use_fp8_storage(toy_mistral4(), {name: block})


def test_experts_of_another_layout_are_refused_by_class() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=72, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    with pytest.raises(ShardtuneError, match="GptOssExperts") as caught:
        use_fp8_storage(model, {"model.layers.0.mlp.experts.down_proj": (1, 1)})
    assert "has_bias=True, is_transposed=True" in caught.value.why
