"""Models held in FP8 that multiply their codes: losses and every adapter's gradient against the dequantised twin."""

from __future__ import annotations

import pytest
import torch
from expert_toys import adapted, distance, loss_and_gradients, toy_blocks
from torch import Tensor, nn
from toys import toy_text_config
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel

from shardtune.adapters.experts import use_grouped_products
from shardtune.adapters.fused import FusedLoraLinear, use_fused_lora
from shardtune.kernels import fp8
from shardtune.model.quantized import SCALE_SUFFIX, Fp8Linear, fp8_candidates, hold_in_fp8, multiply_codes

pytestmark = pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
TARGETS = {
    "llama": (["q_proj", "v_proj", "o_proj", "down_proj"], []),
    "mistral4": (["q_a_proj", "kv_b_proj", "o_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "mixtral": (["q_proj", "v_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
}
SPREAD = 0.1  # errors of a few percent in every product must not add up to more than themselves
IDS = torch.randint(5, 72, (4, 64), generator=torch.Generator().manual_seed(3))


def held_toy(kind: str, dtype: torch.dtype, *, fine: bool = False) -> PreTrainedModel:
    """Held in FP8 with one scale for each row, or (`fine`) with every kind of scale there is."""
    torch.manual_seed(0)
    config = toy_text_config(kind, hidden_size=64, **({"qk_rope_head_dim": 16} if kind == "mistral4" else {}))
    make = Mistral4ForCausalLM if kind == "mistral4" else AutoModelForCausalLM.from_config
    model = make(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=SPREAD * parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
    _make_routers_sure(model)
    values = {name: model.get_parameter(name).detach().clone() for name in fp8_candidates(model)}
    model.to(dtype)
    blocks = toy_blocks(model) if fine else {name: (1, value.shape[-1]) for name, value in values.items()}
    hold_in_fp8(model, blocks)
    with torch.no_grad():
        for name, value in values.items():
            codes, scale = fp8.quantize_rows(value)
            if fine:
                scale = torch.full(fp8.scale_shape(value.shape, blocks[name]), value.abs().max() / 448)
                codes = (value / scale.max()).to(fp8.CODES)
            model.get_parameter(name).copy_(codes)
            model.get_parameter(name + SCALE_SUFFIX).copy_(scale)
    return model


def _make_routers_sure(model: PreTrainedModel) -> None:
    """A token's first elements say which expert it prefers, by far: on the fence, any rounding would send it elsewhere."""
    for name, gate in model.named_parameters():
        if "mlp.gate.weight" in name:
            experts = gate.shape[0]
            with torch.no_grad():
                gate.zero_()[:, :experts] = torch.eye(experts)
                order = torch.stack([torch.randperm(experts) for _ in range(72)])
                model.get_input_embeddings().weight[:, :experts] = order.float() * 2 - experts + 1


def prepared(kind: str, dtype: torch.dtype, *, codes_too: bool, fused: bool = True, compiled: str | None = None):
    modules, parameters = TARGETS[kind]
    model = adapted(held_toy(kind, dtype), modules, parameters)
    use_grouped_products(model)
    if codes_too:
        count, left = multiply_codes(model)
        assert count == sum(len(getattr(module, "fp8_blocks", ())) for module in model.modules()) and not left
    if fused:
        assert use_fused_lora(model) == 2 * len(modules)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    if compiled is not None:
        torch._dynamo.reset()
        for layer in model.get_base_model().model.layers:
            layer.forward = torch.compile(layer.forward, backend=compiled)
    return model


def chosen_experts(model: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[1].sort(dim=-1).values))
    return seen


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TARGETS)
def test_loss_and_every_gradient_stay_near_the_dequantised_twin(kind: str, dtype: torch.dtype, fused: bool) -> None:
    results = []
    for codes_too in (True, False):
        model = prepared(kind, dtype, codes_too=codes_too, fused=fused)
        experts = chosen_experts(model)
        results.append((*loss_and_gradients(model, IDS), experts))
    (loss, gradients, experts), (twin_loss, twins, twin_experts) = results
    assert abs(loss - twin_loss) < 5e-2 * twin_loss
    assert set(gradients) == set(twins) and len(gradients) >= 16
    for name, gradient in twins.items():
        assert gradient.abs().max() > 0 and distance(gradients[name], gradient) < 5e-2, name
    assert max(distance(gradients[name], gradient) for name, gradient in twins.items()) > 1e-2  # it was rounded
    assert len(experts) == len(twin_experts) and all(map(torch.equal, experts, twin_experts))
    assert (len(experts) > 0) == (kind != "llama")


@pytest.mark.parametrize("codes_too", [True, False])
@pytest.mark.parametrize(("kind", "backend"), [("llama", "inductor"), ("mistral4", "aot_eager"), ("mistral4", "inductor")])
def test_compiled_layers_compute_the_same_and_are_compiled_once(kind: str, backend: str, codes_too: bool) -> None:
    dtype = torch.float32 if kind == "llama" else torch.bfloat16  # torch compiles grouped products of bfloat16 alone
    plain = prepared(kind, dtype, codes_too=codes_too)
    model = prepared(kind, dtype, codes_too=codes_too, compiled=backend)
    for step in range(3):  # other tokens go to other experts
        ids = IDS.roll(step, 0) + step
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            loss, gradients = loss_and_gradients(model, ids % 72)
        twin_loss, twins = loss_and_gradients(plain, ids % 72)
        assert abs(loss - twin_loss) < 1e-3
        for name, gradient in twins.items():
            assert distance(gradients[name], gradient) < (1e-2 if dtype == torch.float32 else 5e-2), name
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0


def test_a_step_of_training_leaves_every_code_and_scale_as_it_was() -> None:
    model = prepared("mistral4", torch.float32, codes_too=True)
    before = {n: p.detach().clone().view(torch.uint8) for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    first, _ = loss_and_gradients(model, IDS)
    optimizer.step()
    assert loss_and_gradients(model, IDS)[0] != first
    after = {n: p.detach().view(torch.uint8) for n, p in model.named_parameters() if not p.requires_grad}
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_weights_with_finer_scales_are_counted_and_dequantised() -> None:
    model = held_toy("mistral4", torch.float32, fine=True)
    count, left = multiply_codes(model)
    blocks = [block for module in model.modules() for block in getattr(module, "fp8_blocks", {}).values()]
    fine = blocks.count((12, 12))
    assert fine > 0 and left == {"scales for blocks of 12 × 12": fine}
    assert count == len(blocks) - fine
    assert torch.isfinite(model(input_ids=IDS, labels=IDS).loss)


def test_an_fp8_base_with_lora_takes_the_operator_and_still_switches_off() -> None:
    model = prepared("llama", torch.float32, codes_too=False)
    layers = [m for m in model.modules() if isinstance(m, FusedLoraLinear)]
    assert layers and all(isinstance(layer.base_layer, Fp8Linear) for layer in layers)
    bare = held_toy("llama", torch.float32)
    with torch.no_grad():
        with model.disable_adapter():
            assert torch.equal(model(IDS).logits, bare(IDS).logits)
        assert not torch.allclose(model(IDS).logits, bare(IDS).logits, atol=1e-2)
