"""What trains? Puts PEFT's LoRA on exactly the resolved targets and counts what that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from shardtune.adapters.targets import ALL_LINEAR, Target, resolve_targets
from shardtune.config.schema import LoraSection
from shardtune.errors import ShardtuneError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TargetRow:
    """One line of the adapter table."""

    pattern: str
    modules: int
    parameters: int


@dataclass(frozen=True)
class Coverage:
    """What got an adapter. `total` counts every parameter of the model, adapters included."""

    rows: tuple[TargetRow, ...]
    trainable: int
    total: int

    @property
    def share(self) -> float:
        return self.trainable / self.total


def add_lora(model: PreTrainedModel, section: LoraSection) -> tuple[PeftModel, Coverage]:
    """The model with adapters on what `lora.target_modules` means, and the account of it.

    Adapter weights are float32 whatever the base is (an update of 1e-4 relative size vanishes in bfloat16). They are
    drawn from torch's global generator: seed it alike on every rank before.
    """
    targets = resolve_targets(model, section.target_modules)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=section.r,
            lora_alpha=section.lora_alpha,
            lora_dropout=section.lora_dropout,
            target_modules=_peft_targets(section.target_modules, targets),
            bias=section.bias,
            task_type=section.task_type,
            use_rslora=section.use_rslora,
        ),
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()  # FSDP2 wants one dtype for what trains in a unit
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }
    _check_same(set(layers), {name for target in targets for name in target.modules})
    return adapted, _coverage(adapted, targets, layers)


def _peft_targets(patterns: str | list[str], targets: list[Target]) -> str | list[str]:
    # PEFT understands `all-linear` and names as we do; only a regular expression has to be spelled out.
    entries = [patterns] if isinstance(patterns, str) else patterns
    if entries == [ALL_LINEAR]:
        return ALL_LINEAR
    if all(
        name == target.pattern or name.endswith(f".{target.pattern}") for target in targets for name in target.modules
    ):
        return list(entries)
    return sorted(name for target in targets for name in target.modules)


def _check_same(adapted: set[str], meant: set[str]) -> None:
    if adapted != meant:
        missing, surplus = sorted(meant - adapted), sorted(adapted - meant)
        raise ShardtuneError(
            "PEFT put adapters on other modules than lora.target_modules means.",
            why=f"Missing: {missing[:5] or 'none'}; not asked for: {surplus[:5] or 'none'}.",
            fix="Please report this with the config; naming the modules in full avoids it.",
        )


def _coverage(adapted: PeftModel, targets: list[Target], layers: dict[str, LoraLayer]) -> Coverage:
    def trained(name: str) -> int:
        return sum(p.numel() for p in layers[name].parameters() if p.requires_grad)

    rows = tuple(
        TargetRow(target.pattern, len(target.modules), sum(trained(name) for name in target.modules))
        for target in targets
    )
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return Coverage(rows, trainable, sum(p.numel() for p in adapted.parameters()))
