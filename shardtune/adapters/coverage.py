"""How much trains, and on how much of the model? The account behind the adapter table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer

from shardtune.adapters.sites import Site
from shardtune.adapters.targets import Resolution
from shardtune.model.stored_names import SCALE
from shardtune.model.weight_loading import is_adapter

if TYPE_CHECKING:
    from peft import PeftModel

# How many routed experts a token visits, under the names configs give it.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class TargetRow:
    """One line of the adapter table.

    Args:
        modules: Linear modules with an adapter.
        tensors: Fused expert tensors and router weights with one.
        parameters: Trainable parameters of those adapters.
        covers: Frozen parameters they sit on.
        covers_active: The part of those that one token passes.
    """

    pattern: str
    modules: int
    parameters: int
    tensors: int = 0
    covers: int = 0
    covers_active: float = 0


@dataclass(frozen=True)
class Coverage:
    """What got an adapter.

    Args:
        total: Every parameter of the model, adapters included.
        base: Every parameter of the model without adapters.
        active: Those of them that one token passes: `base` less the routed experts it does not visit.
        visited: (experts a token visits, experts there are); None without routed experts, or where the config does
            not say how many are visited (then all count as active).
        in_full: Of `base`, what trains itself instead of an adapter on it: lora.modules_to_save, rows of new tokens.
    """

    rows: tuple[TargetRow, ...]
    trainable: int
    total: int
    base: int = 0
    active: float = 0
    visited: tuple[int, int] | None = None
    in_full: int = 0

    @property
    def share(self) -> float:
        return self.trainable / self.total


def coverage_of(adapted: PeftModel, resolution: Resolution) -> Coverage:
    """Counts the adapters of each target and the weights they sit on."""
    trained = _trainable_by_site(adapted)
    visited = _visited(adapted, resolution)
    share = visited[0] / visited[1] if visited else 1.0

    def active(site: Site) -> float:
        return site.size * share if site.role == "experts" else site.size

    rows = []
    for target in resolution.targets:
        sites = [resolution.sites[name] for name in (*target.modules, *target.parameters)]
        rows.append(
            TargetRow(
                target.pattern,
                len(target.modules),
                sum(trained[site.name] for site in sites),
                len(target.parameters),
                sum(site.size for site in sites),
                sum(active(site) for site in sites),
            )
        )
    token_rows = [layer for layer in adapted.modules() if isinstance(layer, TrainableTokensLayer)]
    if token_rows:
        own = sum(p.numel() for name, p in adapted.named_parameters() if ".trainable_tokens_delta." in name)
        rows.append(TargetRow("new tokens", len(token_rows), own, covers=own, covers_active=own))
    saved = {name: p.numel() for name, p in adapted.named_parameters() if ".modules_to_save." in name}
    if saved:
        size = sum(saved.values())
        rows.append(TargetRow("in full", len({name.rpartition(".")[0] for name in saved}), size, 0, size, size))
    in_full = sum(row.parameters for row in rows[len(resolution.targets) :])
    # The scales of a weight stored in float8 are how it is stored, not more of the model; nor is what a layer that
    # trains in full was before.
    counted = {
        name: p.numel() for name, p in adapted.named_parameters()
        if not name.endswith(SCALE) and ".original_module." not in name
    }  # fmt: skip
    total = sum(counted.values())
    base = sum(size for name, size in counted.items() if not is_adapter(name))
    routed = sum(site.size for site in resolution.experts)
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    elsewhere = trainable - sum(row.parameters for row in rows)
    if elsewhere:  # lora.bias: all
        biases = [n for n, p in adapted.named_parameters() if p.requires_grad and n.endswith(".bias")]
        outside = sum(".base_layer." not in name for name in biases)
        rows.append(TargetRow("biases of other layers", 0, elsewhere, outside))
    return Coverage(tuple(rows), trainable, total, base, base - routed * (1 - share), visited, in_full)


def _trainable_by_site(adapted: PeftModel) -> dict[str, int]:
    """What trains at each site: its LoRA matrices, and its bias where that trains too."""
    found: dict[str, int] = {}
    for name, module in adapted.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        key = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, ParamWrapper):
            own = [*module.lora_A.parameters(), *module.lora_B.parameters()]
            found[f"{key}.{module.parameter_name}"] = sum(p.numel() for p in own if p.requires_grad)
            if module.parameter_name == "weight":  # a linear module that PEFT addresses by its weight
                found[key] = found[f"{key}.weight"]
        else:
            found[key] = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return found


def _visited(adapted: PeftModel, resolution: Resolution) -> tuple[int, int] | None:
    config = adapted.config
    top_k = next((getattr(config, name) for name in _TOP_K if getattr(config, name, None)), None)
    counts = {site.shape[0] for site in resolution.experts if site.is_parameter}
    return (int(top_k), counts.pop()) if top_k and len(counts) == 1 else None
