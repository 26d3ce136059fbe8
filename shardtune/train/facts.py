"""What is known before anything is chosen? The machine, the model on the meta device, and how full rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from shardtune.adapters.ranks import rank_of
from shardtune.adapters.saved_modules import saved_modules
from shardtune.adapters.targets import resolve_targets
from shardtune.kernels import whole_rows
from shardtune.machine import memory_limit
from shardtune.model.experts import fused_experts
from shardtune.model.families.family import FastPath
from shardtune.train.losses import router
from shardtune.train.losses.fused import why_not as why_not_fused

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from shardtune.adapters.sites import Site
    from shardtune.config.schema import LoraSection, RunConfig
    from shardtune.model.meta_model import MetaModel


@dataclass(frozen=True)
class Machine:
    """Where a run computes. All ranks go by one, so that none of them chooses differently."""

    device: str  # cpu | cuda
    memory: int  # bytes a rank has: its GPU's, or its part of the host's; of the smallest rank
    processes_here: int
    nodes: tuple[int, ...]  # ranks on each node
    lacks_bf16: bool = False  # a CPU without bfloat16 units

    @property
    def world_size(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True)
class Facts:
    """What `resolve` goes by, beside the config.

    Attributes:
        model_class: The class that is trained, for sentences.
        dtype: What the weights are built in: model.torch_dtype, or the checkpoint's own.
        parameters: Of the base, `quantised` of them stored in float8.
        layers: Parameters of each decoder layer.
        widths: Of each decoder layer, the values per token that go into and come out of its products.
        hidden: Width of the residual stream.
        vocabulary: Width of the output head.
        trained: Parameters that train.
        layer_class: The decoder layer's class, where the family knows it.
        module_classes: Of all modules.
        own_attention: The attention code transformers chooses.
        full_attention: In rows of data.max_length every token sees all tokens before it, in every layer.
        has_experts: There are routed experts, fused into one tensor.
        missing: Fast paths that this model does not take, and why.
        unsupported: Those among them that are known to compute something else.
        loss_obstacle: Why head and loss cannot be fused.
        router_coefficient: Weight of the routers' auxiliary loss in training; 0 = none.
        unused_router_loss: A notice where the model's config has a coefficient without an effect.
        fill_share: How much of data.max_length a row takes on average. Prepares the data, so it is asked last, and only
            where something depends on it.
    """

    machine: Machine
    model_class: str
    dtype: str
    parameters: int
    quantised: int
    layers: tuple[int, ...]
    widths: tuple[int, ...]
    hidden: int
    vocabulary: int
    trained: int
    layer_class: str | None
    module_classes: frozenset[str]
    own_attention: str
    attention_dropout: bool
    full_attention: bool
    has_experts: bool
    missing: Mapping[FastPath, str]
    unsupported: Mapping[FastPath, str]
    loss_obstacle: str | None
    router_coefficient: float
    unused_router_loss: str | None
    fill_share: Callable[[], float]

    @property
    def value_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


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
    layers, text = _decoder_layers(meta_model), model.config.get_text_config()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    reasons = {path: family.why_not(path, model.config) for path in get_args(FastPath)}
    return Facts(
        machine=machine,
        model_class=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=sum(sizes.values()),
        quantised=sum(sizes[name] for name in meta_model.mapping.quantised),
        layers=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
        widths=tuple(_width(layer, model) for layer in layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        trained=sum(_adapter_size(site, config.lora) for site in adapted.values())
        + sum(p.numel() for module in saved for p in module.parameters())
        + len(config.model.new_tokens) * text.hidden_size,
        layer_class=meta_model.layer_class,
        module_classes=frozenset(type(module).__name__ for module in model.modules()),
        own_attention=model.config._attn_implementation,
        attention_dropout=bool(getattr(model.config, "attention_dropout", 0.0)),
        full_attention=whole_rows.usable(model.config, config.data.max_length),
        has_experts=bool(fused_experts(model)),
        missing={path: why for path, why in reasons.items() if why is not None},
        unsupported=family.unsupported,
        loss_obstacle=why_not_fused(model, family, coefficient)
        or ("the head itself is trained" if model.get_output_embeddings() in saved else None),
        router_coefficient=coefficient,
        unused_router_loss=router.unused_notice(model),
        fill_share=fill_share,
    )


def _decoder_layers(meta_model: MetaModel) -> list[nn.Module]:
    classes = {meta_model.layer_class} if meta_model.layer_class else set(meta_model.model._no_split_modules or ())
    return [module for module in meta_model.model.modules() if type(module).__name__ in classes]


def _adapter_size(site: Site, section: LoraSection) -> int:
    """Parameters of LoRA's two factors at a site, for each of its experts."""
    *experts, rows, columns = site.shape
    return prod(experts) * rank_of(site, section) * (rows + columns)


def _width(layer: nn.Module, model: PreTrainedModel) -> int:
    """A token passes through the matrices of a layer, and of the fused experts through those it is routed to."""
    routed = getattr(model.config, "num_experts_per_tok", None) or 1
    shapes = [parameter.shape for parameter in layer.parameters()]
    return sum(sum(shape[-2:]) * (routed if len(shape) == 3 else 1) for shape in shapes if len(shape) > 1)


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
