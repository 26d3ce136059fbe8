"""What is known before anything is chosen? The machine, the model on the meta device, and how full rows are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from shardtune.adapters.saved_modules import saved_modules
from shardtune.adapters.targets import resolve_targets
from shardtune.kernels import whole_rows
from shardtune.model.experts import fused_experts
from shardtune.model.families.family import FastPath
from shardtune.train.losses import router
from shardtune.train.losses.fused import why_not as why_not_fused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shardtune.config.schema import LoraSection, RunConfig
    from shardtune.model.families.family import Family
    from shardtune.model.meta_model import MetaModel


@dataclass(frozen=True)
class Machine:
    """Where a run computes. All ranks go by rank 0's, so that none of them chooses differently."""

    device: str  # cpu | cuda
    memory: int  # bytes a rank has: its GPU's, or its part of the host's
    processes_here: int
    world_size: int
    lacks_bf16: bool = False  # a CPU without bfloat16 units


@dataclass(frozen=True)
class Facts:
    """What `resolve` goes by, beside the config.

    Attributes:
        model_class: The class that is trained, for sentences.
        dtype: What the weights are built in: model.torch_dtype, or the checkpoint's own.
        parameters: Of the base, `quantised` of them stored in float8.
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


def machine_of(device: torch.device, world_size: int, processes_here: int) -> Machine:
    on_cpu = device.type == "cpu"
    return Machine(
        device=device.type,
        memory=_memory(device, processes_here),
        processes_here=processes_here,
        world_size=world_size,
        lacks_bf16=on_cpu and _cpu_lacks_bf16(),
    )


def gather_facts(config: RunConfig, meta_model: MetaModel, machine: Machine, fill_share: Callable[[], float]) -> Facts:
    """Look at the model before anything is done to it.

    Raises:
        UserInputError: a LoRA target or a module to save is not in the model, or a router loss was asked for and there
            is none.
    """
    model, family = meta_model.model, meta_model.family
    head_trains = _head_trains(model, config.lora, family)
    model.requires_grad_(False)  # the base is frozen whatever is added to it
    coefficient = router.coefficient(model, config.train.router_aux_loss_coef)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    reasons = {path: family.why_not(path, model.config) for path in get_args(FastPath)}
    return Facts(
        machine=machine,
        model_class=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=sum(sizes.values()),
        quantised=sum(sizes[name] for name in meta_model.mapping.quantised),
        layer_class=meta_model.layer_class,
        module_classes=frozenset(type(module).__name__ for module in model.modules()),
        own_attention=model.config._attn_implementation,
        attention_dropout=bool(getattr(model.config, "attention_dropout", 0.0)),
        full_attention=whole_rows.usable(model.config, config.data.max_length),
        has_experts=bool(fused_experts(model)),
        missing={path: why for path, why in reasons.items() if why is not None},
        unsupported=family.unsupported,
        loss_obstacle=why_not_fused(model, family, coefficient)
        or ("the head itself is trained" if head_trains else None),
        router_coefficient=coefficient,
        unused_router_loss=router.unused_notice(model),
        fill_share=fill_share,
    )


def _head_trains(model: PreTrainedModel, section: LoraSection, family: Family) -> bool:
    """Whether lora.modules_to_save names the output head. Checks every target on the way."""
    adapted = resolve_targets(model, section, family).sites
    saved = saved_modules(model, section, adapted)
    return any(model.get_submodule(name) is model.get_output_embeddings() for name in saved)


def _memory(device: torch.device, processes_here: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes_here


def _cpu_lacks_bf16() -> bool:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False  # not Linux: nothing to go by
    return not flags & {"avx512_bf16", "amx_bf16", "bf16"}
