"""What trains? Puts PEFT's LoRA on exactly the resolved targets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper

from shardtune.adapters.coverage import Coverage, coverage_of
from shardtune.adapters.experts import use_grouped_products, use_linear_products
from shardtune.adapters.new_tokens import use_token_rows
from shardtune.adapters.peft_form import check_as_meant, peft_config
from shardtune.adapters.saved_modules import saved_modules
from shardtune.adapters.targets import resolve_targets
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError
from shardtune.model.families.family import Family
from shardtune.model.families.registry import family_of
from shardtune.model.model_outline import outline_of
from shardtune.model.quantized import Fp8Linear

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_lora(
    model: PreTrainedModel, section: LoraSection, family: Family | None = None, new_tokens: Sequence[int] = ()
) -> tuple[PeftModel, Coverage, list[str]]:
    """The model with adapters on what `lora.target_modules` means, the account of it, and what to tell the user.

    Adapter weights are float32 whatever the base is (an update of 1e-4 relative size vanishes in bfloat16). They are
    drawn from torch's global generator: seed it alike on every rank before. On a model on the meta device they are on
    it too, and nothing is drawn or allocated.

    Args:
        family: What is known about the architecture; None = found by the model's type.
        new_tokens: Ids of tokens whose rows of the embedding and the head train.
    """
    outline = outline_of(model, family or family_of(model))
    resolution = resolve_targets(outline, section)
    in_float8 = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    saved = saved_modules(outline, section, resolution.sites, in_float8)
    _refuse_dora_on_float8(model, section, resolution.sites)
    config = peft_config(model, section, resolution.sites, new_tokens, saved)
    on_meta = any(p.is_meta for p in model.parameters())
    with warnings.catch_warnings():
        # PEFT looks for the patterns' keys among modules only; that ours matched parameters is checked below.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        adapted: PeftModel = get_peft_model(model, config, low_cpu_mem_usage=on_meta)
    _sort_targets(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()  # FSDP2 wants one dtype for what trains in a unit
    check_as_meant(adapted, section, resolution.sites)
    _reinit_on_float8(adapted)
    use_linear_products(adapted)
    if any(site.role == "experts" and site.is_parameter for site in resolution.sites.values()):
        use_grouped_products(adapted)
    use_token_rows(adapted)
    return adapted, coverage_of(adapted, resolution), resolution.notices


def _refuse_dora_on_float8(model: PreTrainedModel, section: LoraSection, sites: Iterable[str]) -> None:
    fp8 = [name for name in sites if section.use_dora and isinstance(model.get_submodule(name), Fp8Linear)]
    if fp8:
        raise UserInputError(
            f"lora.use_dora: '{fp8[0]}' is stored in FP8, and DoRA needs the norms of its rows in every forward pass.",
            fix="Set model.base_precision: bf16, or lora.use_dora: false.",
        )


def _sort_targets(adapted: PeftModel) -> None:
    """PEFT keeps names as a set, which is written to adapter_config.json in another order each time."""
    config = adapted.peft_config["default"]
    config.target_modules = sorted(config.target_modules)
    config.target_parameters = sorted(config.target_parameters) if config.target_parameters else None


def _reinit_on_float8(adapted: PeftModel) -> None:
    """PEFT rounds what it has drawn to the dtype of the base; float8 has eight steps to a doubling."""
    for layer in adapted.modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
        if base.element_size() == 1 and not base.is_meta:
            layer.reset_lora_parameters("default", True)
