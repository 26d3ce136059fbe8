"""What did `auto` turn out to be? Settles what the config left open, once the machine is known, and says why."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardtune.adapters.fused import use_fused_lora
from shardtune.errors import UserInputError
from shardtune.kernels import fp8_products
from shardtune.model.experts import fused_experts, use_expert_loops, use_grouped_experts
from shardtune.model.families.registry import known_decoder_layers
from shardtune.model.quantized import fp8_candidates
from shardtune.plan.precision import base_precision
from shardtune.train.losses import router
from shardtune.train.losses.fused import why_not as why_not_fused

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import TrainSection
    from shardtune.model.families.family import Family
    from shardtune.model.meta_model import MetaModel
    from shardtune.parallel.processes import Processes


def resolve_autos(resolved: ResolvedConfig, *, device: str, processes_here: int) -> ResolvedConfig:
    """Every `auto` replaced by its value; `origins` then tell that it was chosen, and why."""
    if device == "cpu":
        resolved = resolved.on_cpu()
    config = resolved.config
    if config.parallel.device == "auto":
        resolved = resolved.with_auto("parallel.device", device, f"torch sees {device}")
    if config.parallel.nproc == "auto":
        resolved = resolved.with_auto("parallel.nproc", processes_here, "processes started on this machine")
    if config.train.eval_strategy == "auto":
        given = config.data.val_split is not None
        resolved = resolved.with_auto(
            "train.eval_strategy", "steps" if given else "no", f"data.val_split is {'given' if given else 'null'}"
        )
    return resolved


def resolve_dtype(resolved: ResolvedConfig, meta_model: MetaModel) -> ResolvedConfig:
    """What weights are held in, by the checkpoint where `auto` leaves it to that, and what products are computed in.

    Raises:
        UserInputError: biases would train in float32 beside weights that compute in bfloat16.
    """
    held = str(meta_model.model.dtype).removeprefix("torch.")
    if resolved.config.model.torch_dtype == "auto":
        why = "the checkpoint's own dtype, or bfloat16 where that is float16"
        resolved = resolved.with_auto("model.torch_dtype", held, why)
    if resolved.config.train.bf16 == "auto":
        resolved = resolved.with_auto("train.bf16", held == "bfloat16", f"the model is held in {held}")
    config = resolved.config
    if config.lora.bias != "none" and held == "bfloat16" and not config.train.bf16:
        raise UserInputError(
            f"lora.bias is {config.lora.bias}, but train.bf16 is false with weights in bfloat16.",
            why="What trains is float32, and a bias is added to a product of its weight's dtype.",
            fix="Set train.bf16: true, or model.torch_dtype: float32.",
        )
    return resolved


def resolve_layer_class(resolved: ResolvedConfig, meta_model: MetaModel) -> tuple[ResolvedConfig, list[str]]:
    """A decoder layer's class that was copied from another architecture's file means this model's decoder layer.

    A class that is in the model stays what it says.

    Returns:
        The config, and a notice if something was translated.

    Raises:
        UserInputError: a class that is neither in the model nor a decoder layer anywhere.
    """
    key = "parallel.transformer_layer_cls_to_wrap"
    asked = resolved.config.parallel.transformer_layer_cls_to_wrap or []
    names = [asked] if isinstance(asked, str) else asked
    present = {type(module).__name__ for module in meta_model.model.modules()}
    copied = [name for name in names if name not in present and name in known_decoder_layers()]
    own = meta_model.layer_class
    if own not in present:
        return resolved, []
    where = resolved.origins[key].where or key
    model = type(meta_model.model).__name__
    if unknown := [name for name in names if name not in present and name not in copied]:
        raise UserInputError(
            f"{where}: no module of class {', '.join(unknown)} in the model.",
            why=f"The decoder layer of {model} is {own}.",
            fix=f"Write {own} there, or leave the key out: it is found by itself.",
        )
    if not copied:
        return resolved, []
    meant = list(dict.fromkeys(own if name in copied else name for name in names))
    reason = f"{', '.join(copied)}: a decoder layer of another architecture, not in {model}"
    notice = f"{where}: {', '.join(copied)} is read as {own}, the decoder layer of {model}."
    return resolved.with_auto(key, meant[0] if len(meant) == 1 else meant, reason), [notice]


def resolve_kernels(
    resolved: ResolvedConfig, model: PreTrainedModel, family: Family, device: torch.device
) -> ResolvedConfig:
    """Which fused code runs, and where it does not, why.

    Raises:
        UserInputError: something was asked for that this model cannot have, or products in FP8, and nothing is held in
            FP8.
    """
    train = resolved.config.train
    eager = "train.kernels is eager" if train.kernels == "eager" else None
    coefficient = router.coefficient(model, train.router_aux_loss_coef)
    obstacle = why_not_fused(model, family, coefficient)
    _refuse_impossible(train, model, family, loss_obstacle=obstacle)
    held = resolved.config.model.base_precision
    if train.fp8_compute is True and held != "fp8":
        raise UserInputError(
            "train.fp8_compute is true, but no weight is held in FP8.",
            why=f"model.base_precision is {held}, and what is multiplied as float8 is the frozen base.",
            fix="Set model.base_precision: fp8, or train.fp8_compute: auto or false.",
        )
    if train.fp8_compute == "auto":
        reason = "it rounds activations to float8: to be asked for" if held == "fp8" else f"the base is {held}"
        resolved = resolved.with_auto("train.fp8_compute", False, reason)
    halves = resolved.config.train.bf16 or model.dtype in (torch.bfloat16, torch.float16)
    on_gpu = None if device.type == "cuda" and halves else "compiling pays on a GPU in half precision"
    for key, why in (
        ("fused_lora", eager),
        ("fused_experts", eager or (family.why_not("fused_experts", model.config) if fused_experts(model) else None)),
        ("fused_loss", eager or obstacle),
        ("compile", eager or on_gpu or family.why_not("compile", model.config)),
    ):
        if getattr(train, key) == "auto":
            resolved = resolved.with_auto(f"train.{key}", why is None, why or "this machine and model have it")
    return resolved


def _refuse_impossible(
    train: TrainSection, model: PreTrainedModel, family: Family, *, loss_obstacle: str | None
) -> None:
    """What is asked for by name, and would not compute what the model means, or do nothing."""
    selective = family.why_not("selective", model.config)
    for key, asked, why, instead in (
        ("fused_loss", True, loss_obstacle, "auto or false"),
        ("fused_experts", True, family.unsupported.get("fused_experts"), "auto or false"),
        ("gradient_checkpointing", "selective", selective, "full"),
    ):
        if getattr(train, key) == asked and why is not None:
            raise UserInputError(
                f"train.{key} is {str(asked).lower()}, which {type(model).__name__} cannot have.",
                why=why[0].upper() + why[1:] + ".",
                fix=f"Set train.{key}: {instead}.",
            )


@dataclass(frozen=True)
class Fused:
    """How many layers compute in fused code, of how many that have such a thing: (0, n) where it is switched off."""

    lora: tuple[int, int]
    experts: tuple[int, int]


def fuse(model: PeftModel, train: TrainSection) -> Fused:
    """Switch the layers of an adapted model over to what was settled."""
    return Fused(
        lora=use_fused_lora(model) if train.fused_lora else (0, 0),
        experts=use_grouped_experts(model)
        if train.fused_experts
        else (0, use_expert_loops(model, compiled=bool(train.compile))),
    )


def resolve_precision(resolved: ResolvedConfig, meta_model: MetaModel, processes: Processes) -> ResolvedConfig:
    """How the frozen weights are held, where the config leaves it open."""
    if resolved.config.model.base_precision != "auto":
        return resolved
    mapping, sizes = meta_model.mapping, {name: p.numel() for name, p in meta_model.model.named_parameters()}
    chosen, why = base_precision(
        quantised=sum(sizes[name] for name in mapping.quantised),
        parameters=sum(sizes.values()),
        value_bytes=meta_model.model.dtype.itemsize,
        ranks=processes.world_size,
        memory=_memory(processes.device),
    )
    # Ranks with different memory must not choose differently.
    chosen, why = processes.share_from_main([chosen, why])
    return resolved.with_auto("model.base_precision", chosen, why)


def fp8_compute_notice(multiplied: int, left: Counter[str], device: torch.device) -> str:
    """What `train.fp8_compute: true` came to."""
    parts = [f"train.fp8_compute: {multiplied} weights are multiplied as float8 codes, activations rounded to float8"]
    if lacking := fp8_products.missing_units(device):
        parts.append(f"{lacking}: rounded the same way, they are multiplied by the eager twin, without a gain in speed")
    for why, count in left.most_common():
        parts.append(f"{count} are dequantised for each product, because they have {why}")
    return "; ".join(parts) + "."


def fp8_blocks(meta_model: MetaModel) -> dict[str, tuple[int, int]]:
    """Which parameters are held in float8, and the block of each: as stored, or one scale per row where quantised here.

    In an FP8 checkpoint what is stored in full stays in full.
    """
    mapping = meta_model.mapping
    family = meta_model.family
    # Kernels read the weights of what is bypassed as they are.
    excluded = {name.removesuffix(".weight") for name in family.router} | set(family.bypassed)
    candidates = fp8_candidates(meta_model.model, excluded)
    stored = [name for name in candidates if name in mapping.quantised]
    if stored:
        return {name: mapping.block(name) for name in stored}
    return {name: (1, meta_model.model.get_parameter(name).shape[-1]) for name in candidates}


def _memory(device: torch.device) -> int:
    """Bytes one rank has: its GPU's, or its part of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def slow_precision_notice(torch_dtype: str, device: str) -> str | None:
    """What to tell someone who trains in bfloat16 on a CPU that has no units for it."""
    if device != "cpu" or torch_dtype != "bfloat16":
        return None
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return None  # not Linux: nothing to go by
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        return None
    return (
        "model.torch_dtype is bfloat16, but this CPU has no bfloat16 units: expect steps many times slower. "
        "Set model.torch_dtype: float32."
    )
