"""What is known before anything is chosen? The machine, the model on the meta device, and how full rows are."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from shardtune.adapters.ranks import rank_of
from shardtune.adapters.saved_modules import saved_modules
from shardtune.adapters.targets import resolve_targets
from shardtune.kernels import whole_rows
from shardtune.machine import memory_limit
from shardtune.model.families.family import FastPath
from shardtune.plan.facts import Facts, LayerKind, Machine
from shardtune.train.losses import router
from shardtune.train.losses.fused import why_not as why_not_fused

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from shardtune.adapters.sites import Site
    from shardtune.config.schema import LoraSection, RunConfig
    from shardtune.model.meta_model import MetaModel


def machine_of(device: torch.device, nodes: tuple[int, ...], processes_here: int) -> Machine:
    on_cpu = device.type == "cpu"
    return Machine(
        device=device.type,
        memory=_memory(device, processes_here),
        processes_here=processes_here,
        nodes=nodes,
        lacks_bf16=on_cpu and _cpu_lacks_bf16(),
    )


def gather_facts(config: RunConfig, meta_model: MetaModel, machine: Machine, fill_share: Callable[[], float]) -> Facts:
    """Look at the model before anything is done to it.

    Raises:
        UserInputError: a LoRA target or a module to save is not in the model, or a router loss was asked for and there
            is none.
    """
    model, family = meta_model.model, meta_model.family
    adapted = resolve_targets(model, config.lora, family).sites
    saved = [model.get_submodule(name) for name in saved_modules(model, config.lora, adapted)]
    model.requires_grad_(False)  # the base is frozen whatever is added to it
    coefficient = router.coefficient(model, config.train.router_aux_loss_coef)
    text = model.config.get_text_config()
    kinds, inside = _kinds(meta_model, config.lora, adapted)
    reasons = {path: family.why_not(path, model.config) for path in get_args(FastPath)}
    return Facts(
        machine=machine,
        model_type=model.config.model_type,
        model_class=type(model).__name__,
        model=text.to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        kinds=kinds,
        root={name: tuple(p.shape) for name, p in model.named_parameters() if name not in inside},
        trained=sum(_adapter_size(site, config.lora) for site in adapted.values())
        + sum(p.numel() for module in saved for p in module.parameters())
        + len(config.model.new_tokens) * text.hidden_size,
        layer_class=meta_model.layer_class,
        module_classes=frozenset(type(module).__name__ for module in model.modules()),
        own_attention=model.config._attn_implementation,
        attention_dropout=bool(getattr(model.config, "attention_dropout", 0.0)),
        full_attention=whole_rows.usable(model.config, config.data.max_length),
        missing={path: why for path, why in reasons.items() if why is not None},
        unsupported=family.unsupported,
        loss_obstacle=why_not_fused(model, family, coefficient)
        or ("the head itself is trained" if model.get_output_embeddings() in saved else None),
        router_coefficient=coefficient,
        unused_router_loss=router.unused_notice(model),
        fill_share=fill_share,
    )


def _kinds(
    meta_model: MetaModel, section: LoraSection, adapted: dict[str, Site]
) -> tuple[tuple[LayerKind, ...], set[str]]:
    """The decoder layers, alike ones together, and the names of all their parameters."""
    found: list[tuple[dict[str, tuple[int, ...]], frozenset[str], dict[str, int], int | None]] = []
    inside: set[str] = set()
    text = meta_model.model.config.get_text_config()
    for number, (prefix, layer) in enumerate(_decoder_layers(meta_model)):
        shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
        inside |= {f"{prefix}.{name}" for name in shapes}
        quantised = frozenset(name for name in shapes if f"{prefix}.{name}" in meta_model.mapping.quantised)
        ranks = {
            name.removeprefix(f"{prefix}."): rank_of(site, section)
            for name, site in adapted.items()
            if name.startswith(f"{prefix}.")
        }
        found.append((shapes, quantised, ranks, _window(text, number)))
    kinds = [LayerKind(found.count(one), *one) for number, one in enumerate(found) if found.index(one) == number]
    return tuple(kinds), inside


def _window(config: PretrainedConfig, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    reach = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return reach.get(kinds[layer] if kinds else "sliding_attention")


def _decoder_layers(meta_model: MetaModel) -> list[tuple[str, nn.Module]]:
    classes = {meta_model.layer_class} if meta_model.layer_class else set(meta_model.model._no_split_modules or ())
    return [(name, module) for name, module in meta_model.model.named_modules() if type(module).__name__ in classes]


def _adapter_size(site: Site, section: LoraSection) -> int:
    """Parameters of LoRA's two factors at a site, for each of its experts."""
    *experts, rows, columns = site.shape
    return prod(experts) * rank_of(site, section) * (rows + columns)


def _memory(device: torch.device, processes_here: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_limit() // processes_here


def _cpu_lacks_bf16() -> bool:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False  # not Linux: nothing to go by
    return not flags & {"avx512_bf16", "amx_bf16", "bf16"}
