"""Toys held in FP8 whose codes can be multiplied: sides of 16s, and routers that no rounding puts on the fence."""

from __future__ import annotations

import torch
from expert_toys import adapted, make_routers_sure, toy_blocks
from peft import PeftModel
from torch import Tensor, nn
from toys import toy_text_config
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel

from shardtune.adapters.experts import use_grouped_products
from shardtune.adapters.fused import use_fused_lora
from shardtune.kernels import fp8
from shardtune.model.quantized import enable_fp8_compute, fp8_candidates, use_fp8_storage
from shardtune.model.stored_names import SCALE

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
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=SPREAD * parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
    make_routers_sure(model)
    values = {name: model.get_parameter(name).detach().clone() for name in fp8_candidates(model)}
    model.to(dtype)
    blocks = toy_blocks(model) if fine else {name: (1, value.shape[-1]) for name, value in values.items()}
    use_fp8_storage(model, blocks)
    with torch.no_grad():
        for name, value in values.items():
            codes, scale = fp8.quantize_rows(value)
            if fine:
                scale = torch.full(fp8.scale_shape(value.shape, blocks[name]), value.abs().max() / 448)
                codes = (value / scale.max()).to(fp8.CODES)
            model.get_parameter(name).copy_(codes)
            model.get_parameter(name + SCALE).copy_(scale)
    return model


def prepared(
    kind: str, dtype: torch.dtype, *, codes_too: bool, fused: bool = True, compiled: str | None = None
) -> PeftModel:
    """A held toy with adapters that do something, its kernels chosen."""
    modules, parameters = TARGETS[kind]
    model = adapted(held_toy(kind, dtype), modules, parameters)
    use_grouped_products(model)
    if codes_too:
        count, left = enable_fp8_compute(model)
        assert count == sum(len(getattr(module, "fp8_blocks", ())) for module in model.modules()) and not left
    if fused:
        assert use_fused_lora(model)[0] == 2 * len(modules)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    if compiled is not None:
        torch._dynamo.reset()
        for layer in model.get_base_model().model.layers:
            layer.forward = torch.compile(layer.forward, backend=compiled)
    return model


def chosen_experts(model: nn.Module) -> list[Tensor]:
    """Filled as the model runs: which experts each token went to, layer by layer."""
    seen: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[1].sort(dim=-1).values))
    return seen
