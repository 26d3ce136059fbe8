"""Who holds what? One function: precision, then `fully_shard` on each decoder layer and the rest, then prefetch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardtune.config.schema import ParallelSection
from shardtune.errors import ShardtuneError, UserInputError
from shardtune.parallel.activation_checkpointing import apply_selective_checkpointing
from shardtune.parallel.mesh import Mesh
from shardtune.parallel.offload import offloads_params

if TYPE_CHECKING:
    from peft import PeftModel

_COMPILED_VERSIONS = 64  # of a layer's code
_ONE_UNIT = 2**30  # bytes of parameters that one process gathers all at once
_REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sharding:
    """How the model was sharded: over which ranks, in which FSDP units, and the bytes this rank holds of the total."""

    mesh: Mesh
    layer_class: str
    units: int
    local_bytes: int
    total_bytes: int


def shard_model(
    model: PeftModel,
    section: ParallelSection,
    mesh: Mesh,
    compute_dtype: torch.dtype | None,
    layer_class: str | None = None,
    *,
    selective: bool = False,
    compiled: bool = False,
) -> Sharding:
    """Shard `model` in place over `mesh`; a mesh of one takes the same path, so one process computes the same thing.

    Where every rank holds the whole base, FSDP2 has the adapters alone.

    Args:
        model: Adapters already on it; on the meta device, or anywhere if identical on every rank.
        section: `reshard_after_forward` resolved.
        compute_dtype: Parameters are gathered in this dtype (the float32 adapters too; their shards and the optimizer
            stay float32). None keeps each parameter's own.
        layer_class: What the model's family shards layer by layer, where the config does not say.
        selective: Selective activation checkpointing of the layers.

    Returns:
        The units, and how much this rank holds.
    """
    layers = decoder_layers(model, section.transformer_layer_cls_to_wrap or layer_class)
    for layer in layers:
        layer.is_decoder_layer = True  # type: ignore[assignment]
    if selective:
        apply_selective_checkpointing(layers)
    if compiled:
        compile_layers(layers)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=_REDUCE_DTYPES[section.reduce_dtype],
        cast_forward_inputs=compute_dtype is not None,
    )
    on_host = offloads_params(section, torch.device(mesh.device_type))
    offload: OffloadPolicy = CPUOffloadPolicy() if on_host else OffloadPolicy()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    ignored = _unsharded_params(model, mesh, compute_dtype, section)
    if mesh.splits_adapters_only and (ignored is None or any(not p.requires_grad for p in _others(model, ignored))):
        raise ShardtuneError("Adapters cannot be sharded further than frozen weights that FSDP2 has too.")
    units = [] if _fits_one_unit(model, ignored) else layers
    for layer in units:
        fully_shard(
            layer,
            mesh=mesh.trained,
            reshard_after_forward=frees_after_forward(section, mesh),
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=_unsharded_params(layer, mesh, compute_dtype, section),
        )
    # The root unit holds embeddings, final norm and head. They stay gathered between forward and backward: the head
    # is the first thing backward needs.
    fully_shard(model, mesh=mesh.trained, mp_policy=precision, offload_policy=offload, ignored_params=ignored)
    _exempt_fp8_from_cast(model, precision, ignored or set())
    _prefetch(
        cast(FSDPModule, model),
        [cast(FSDPModule, layer) for layer in units],
        section.forward_prefetch,
        section.backward_prefetch,
    )
    unit = units[0] if units else model.get_base_model()
    return Sharding(mesh, type(unit).__name__.removeprefix("FSDP"), len(units) or 1, local_bytes(model), total)


def can_split_adapters(
    model: nn.Module, compute_dtype: torch.dtype | None, section: ParallelSection, device: torch.device
) -> bool:
    """Whether no frozen weight needs FSDP2, so that adapters may be sharded where the base is not."""
    if offloads_params(section, device):
        return False
    return all(p.requires_grad or _stays_as_it_is(name, p, compute_dtype) for name, p in model.named_parameters())


def gathered_bytes(module: nn.Module, compute_dtype: torch.dtype | None) -> int:
    """Bytes of its frozen weights when FSDP2 gathers them: cast to the compute dtype, but for FP8."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return sum(
        p.numel() * (p.dtype if _stays_as_it_is(name, p, compute_dtype) else compute_dtype or p.dtype).itemsize
        for name, p in frozen
    )


def frees_after_forward(section: ParallelSection, mesh: Mesh) -> bool:
    """Gathered adapters alone are small: they stay for the whole step."""
    return bool(section.reshard_after_forward) and not mesh.splits_adapters_only


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile each layer's forward, without the hooks of FSDP and full activation checkpointing around it.

    All layers share one compiled code. Training, evaluation and a smaller last batch each need their own version, and
    past its limit torch falls back to uncompiled code, which breaks recomputation: what is kept then differs between
    the two passes.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILED_VERSIONS)
    # What a layer's forward writes down besides its result (a router its logits) is not wanted twice. Without this,
    # selective recomputation keeps such a layer from being compiled.
    if hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def _unsharded_params(
    module: nn.Module, mesh: Mesh, compute_dtype: torch.dtype | None, section: ParallelSection
) -> set[nn.Parameter] | None:
    """Frozen parameters that FSDP2 need not touch: where a rank holds all of them there is nobody to gather from, and a
    copy of every layer in every pass is what sharding it would come to."""
    if mesh.shards > 1 or offloads_params(section, torch.device(mesh.device_type)):
        return None
    return {
        p for name, p in module.named_parameters() if not p.requires_grad and _stays_as_it_is(name, p, compute_dtype)
    }  # fmt: skip


def _stays_as_it_is(name: str, parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> bool:
    """Whether nothing casts it for a layer's forward pass, as FSDP2's policy would."""
    return parameter.dtype == compute_dtype or compute_dtype is None or _is_fp8_part(name, parameter)


def _others(model: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter not in ignored]


def _fits_one_unit(model: nn.Module, ignored: set[nn.Parameter] | None) -> bool:
    """Is what FSDP2 gathers so little that layers need no units of their own? Only where frozen weights stay put.

    Every unit's hooks and collectives cost the host time in every step, and a GPU waits for it.
    """
    if ignored is None:
        return False
    return sum(p.numel() * p.element_size() for p in _others(model, ignored)) <= _ONE_UNIT


def decoder_layers(model: nn.Module, classes: str | list[str] | None) -> list[nn.Module]:
    """The layers to shard one by one: those of the named classes, or those the model itself says never to split."""
    if classes is None:
        wanted = set(getattr(model, "_no_split_modules", None) or ())
    else:
        wanted = {classes} if isinstance(classes, str) else set(classes)
    present = Counter(type(module).__name__ for module in model.modules())
    unknown = sorted(wanted - set(present)) if classes is not None else []
    layers = [module for module in model.modules() if type(module).__name__ in wanted]
    if unknown or not layers:
        own = Counter(
            type(m).__name__ for m in model.modules() if not type(m).__module__.startswith(("torch.", "peft."))
        )
        repeated = ", ".join(f"{name} (×{n})" for name, n in own.most_common() if n > 1)
        raise UserInputError(
            f"parallel.transformer_layer_cls_to_wrap: no module of class {', '.join(unknown)} in the model."
            if unknown
            else "The model does not define which of its layers to shard individually.",
            why=f"Classes that occur more than once: {repeated}.",
            fix="Set parallel.transformer_layer_cls_to_wrap to the class of the decoder layer, or leave it null.",
        )
    return layers


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that was sharded, whether or not they are units of their own."""
    return [module for module in model.modules() if getattr(module, "is_decoder_layer", False)]


def local_bytes(model: nn.Module) -> int:
    """Bytes of parameters this process really holds (a DTensor counts its local shard)."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in local)


def reshard_all(model: nn.Module) -> None:
    """Free what a forward pass without a backward one leaves gathered: each rank holds its shards alone again.

    The root unit stays gathered for a backward pass, and every unit without `reshard_after_forward`. Until then
    `model.parameters()` are the gathered ones: other tensors, maybe rounded, than those the optimizer has.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class GradientSync:
    """Reduces gradients over ranks at a step's last micro-batch only, where that pays.

    Until then each rank holds whole gradients of what trains instead of its shard, and nothing is sent. Not with
    offloaded parameters, whose shards are in host memory. What stays gathered from forward to backward also stays until
    the next micro-batch, so that it is gathered once a step.
    """

    def __init__(self, model: nn.Module, section: ParallelSection, mesh: Mesh, accumulation: int) -> None:
        offloaded = offloads_params(section, torch.device(mesh.device_type))
        once = mesh.size > 1 and accumulation > 1 and not offloaded
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)] if once else []
        self.gathers_once = not frees_after_forward(section, mesh)

    def before_micro_batch(self, *, last: bool) -> None:
        for unit in self.units:  # with `recurse` it would go through all modules in each step
            unit.set_requires_gradient_sync(last, recurse=False)
            if self.gathers_once:
                unit.set_reshard_after_backward(last, recurse=False)


def _exempt_fp8_from_cast(model: nn.Module, precision: MixedPrecisionPolicy, ignored: set[nn.Parameter]) -> None:
    """Exempt FP8 codes and their scales from the policy's cast: a code in bf16 is no code, a scale in bf16 is rounded.

    FSDP2 has one policy for a whole unit and casts every floating-point parameter before the all-gather, float8 too
    (mixed dtypes it gathers as bytes). A unit of their own would cost a second all-gather in each layer. But each
    parameter reads the policy for itself, in `FSDPParam.init_dtype_attrs` when its unit first runs: these read one
    without a cast.
    """
    as_stored = replace(precision, param_dtype=None)
    exempt = 0
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            if _is_fp8_part(parameter._module_info.param_name, parameter.sharded_param):
                parameter.init_dtype_attrs = partial(  # type: ignore[method-assign]
                    _read_policy, parameter.init_dtype_attrs, as_stored
                )
                exempt += 1
    expected = sum(_is_fp8_part(name, p) for name, p in model.named_parameters() if p not in ignored)
    if exempt != expected:
        raise ShardtuneError(
            f"{expected - exempt} of {expected} FP8 parameters would be cast before the all-gather.",
            why=f"They were not found in FSDP2's parameter groups (torch {torch.__version__}).",
            fix="Set model.base_precision: bf16, and please report the version of torch.",
        )


def _is_fp8_part(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float8_e4m3fn or name.endswith("_scale_inv")


def _read_policy(
    read: Callable[[MixedPrecisionPolicy], None], instead: MixedPrecisionPolicy, _unit: MixedPrecisionPolicy
) -> None:
    read(instead)


def _prefetch(root: FSDPModule, layers: list[FSDPModule], forward: int, backward: int) -> None:
    # accelerate sets neither direction. Left alone, FSDP2 prefetches nothing in forward and one unit in backward; an
    # empty list means "left alone", so "none" is said by naming the unit itself, which is gathered by then.
    for index, layer in enumerate(layers):
        if ahead := layers[index + 1 : index + 1 + forward]:
            layer.set_modules_to_forward_prefetch(ahead)
        before = layers[max(0, index - backward) : index][::-1]
        layer.set_modules_to_backward_prefetch(before or [layer])
    # The head goes back before any layer does: left alone, it would gather the last one whatever was asked for.
    last = layers[max(0, len(layers) - backward) :][::-1]
    root.set_modules_to_backward_prefetch(last or [root])
