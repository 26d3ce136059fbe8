"""What does `resolve` go by? Facts from a model's outline, the same for one that was built and for files alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import TYPE_CHECKING, get_args

from shardtune.adapters.ranks import rank_of
from shardtune.adapters.saved_modules import saved_modules
from shardtune.adapters.targets import resolve_targets
from shardtune.errors import UserInputError
from shardtune.model.families.family import FastPath
from shardtune.model.text_config import sees_whole_rows, window
from shardtune.plan.facts import Facts, LayerKind, Machine

if TYPE_CHECKING:
    from shardtune.adapters.sites import Site
    from shardtune.config.schema import LoraSection, RunConfig
    from shardtune.model.outline import Outline

# What models do between head and loss, by the name in their config; the fused loss does none of it.
_BETWEEN = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


def gather_facts(config: RunConfig, outline: Outline, machine: Machine, fill_share: Callable[[], float]) -> Facts:
    """Look at the model before anything is done to it.

    Raises:
        UserInputError: a LoRA target or a module to save is not in the model, or a router loss was asked for and there
            is none.
    """
    family = outline.family
    adapted = resolve_targets(outline, config.lora).sites
    saved = saved_modules(outline, config.lora, adapted)
    coefficient = router_coefficient(outline, config.train.router_aux_loss_coef)
    reasons = {path: family.why_not(path, outline.config) for path in get_args(FastPath)}
    return Facts(
        machine=machine,
        model_type=outline.model_type,
        model_class=outline.model_class,
        model=outline.config,
        dtype=outline.dtype,
        kinds=_kinds(outline, config.lora, adapted),
        root={name: shape for name, shape in outline.parameters.items() if not outline.below_layer(name)[0]},
        trained=_trained(outline, config, adapted, saved),
        layer_class=outline.layer_class,
        module_classes=frozenset(outline.modules.values()),
        own_attention=outline.own_attention,
        attention_dropout=bool(outline.config.get("attention_dropout")),
        full_attention=sees_whole_rows(outline.config, config.data.max_length),
        missing={path: why for path, why in reasons.items() if why is not None},
        unsupported=family.unsupported,
        loss_obstacle=loss_obstacle(outline, coefficient, saved),
        router_coefficient=coefficient,
        unused_router_loss=_unused_router_loss(outline),
        fill_share=fill_share,
    )


def router_coefficient(outline: Outline, given: float | None) -> float:
    """The weight of the routers' auxiliary loss in training, by TRL's rule: as given, or the config's own. 0 = none.

    Raises:
        UserInputError: one is given, and the model has no auxiliary loss.
    """
    if outline.router_loss == "none":
        if given:
            raise UserInputError(
                f"train.router_aux_loss_coef is {given}, but {outline.model_class} has no auxiliary loss.",
                why="It is not a mixture of experts whose forward computes one from its router logits.",
                fix="Remove train.router_aux_loss_coef.",
            )
        return 0.0
    return float(outline.config.get("router_aux_loss_coef") or 0.0 if given is None else given)


def loss_obstacle(outline: Outline, coefficient: float = 0.0, saved: Collection[str] = ()) -> str | None:
    """Why this model's loss cannot be fused with its head; None = it can.

    Args:
        coefficient: Weight of the routers' auxiliary loss, which is computed beside it.
        saved: Modules that train in full.
    """
    if (unknown := outline.family.why_not("fused_loss", outline.config)) is not None:
        return unknown
    for name in _BETWEEN:
        if outline.config.get(name) not in (None, 1, 1.0):
            return f"{outline.model_class} has {name} between its head and its loss"
    if coefficient and outline.router_loss == "own":
        return f"{outline.model_class} computes the router's auxiliary loss in a way of its own"
    if not outline.head or "bias" in outline.owners.get(outline.head, {}):
        return f"the head of {outline.model_class} is not a plain matrix"
    return "the head itself is trained" if outline.head in saved else None


def _unused_router_loss(outline: Outline) -> str | None:
    """Said where the model's config has a coefficient and its forward nothing to weigh with it."""
    own = outline.config.get("router_aux_loss_coef")
    if not own or outline.router_loss != "none":
        return None
    return (
        f"The loss is the cross-entropy alone: {outline.model_class} computes no auxiliary loss for its routers, so "
        f"router_aux_loss_coef ({own:g}) in the model's config has no effect."
    )


def _kinds(outline: Outline, section: LoraSection, adapted: Mapping[str, Site]) -> tuple[LayerKind, ...]:
    """The decoder layers, alike ones together."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {layer: {} for layer in outline.layers}
    ranks: dict[str, dict[str, int]] = {layer: {} for layer in outline.layers}
    for name, shape in outline.parameters.items():
        layer, below = outline.below_layer(name)
        if layer:
            shapes[layer][below] = shape
    for site in adapted.values():
        if site.below:
            ranks[outline.below_layer(site.name)[0]][site.below] = rank_of(site, section)
    found = [
        LayerKind(
            count=1,
            parameters=shapes[layer],
            quantised=frozenset(name for name in shapes[layer] if f"{layer}.{name}" in outline.quantised),
            adapted=ranks[layer],
            window=window(outline.config, number),
        )
        for number, layer in enumerate(outline.layers)
    ]
    firsts = [kind for number, kind in enumerate(found) if found.index(kind) == number]
    return tuple(
        LayerKind(found.count(kind), kind.parameters, kind.quantised, kind.adapted, kind.window) for kind in firsts
    )


def _trained(outline: Outline, config: RunConfig, adapted: Mapping[str, Site], saved: Collection[str]) -> int:
    """Parameters of LoRA's factors, and of all that trains beside them."""
    section = config.lora
    factors = sum(_adapter_size(site, section) for site in adapted.values())
    in_full = sum(prod(shape) for name in saved for shape in outline.owners[name].values())
    rows = len(config.model.new_tokens) * (1 if outline.tied else 2)  # of the embedding, and of the head
    width = outline.owners[outline.embedding]["weight"][-1]
    return factors + in_full + rows * width + _biases(outline, section, adapted)


def _adapter_size(site: Site, section: LoraSection) -> int:
    """LoRA's two factors for each expert of a site; with DoRA the magnitude of each row too."""
    *experts, rows, columns = site.shape
    magnitudes = rows if section.use_dora else 0
    return prod(experts) * rank_of(site, section) * (rows + columns) + magnitudes


def _biases(outline: Outline, section: LoraSection, adapted: Mapping[str, Site]) -> int:
    """What `lora.bias` adds: of layers with an adapter, or every one there is."""
    if section.bias == "none":
        return 0
    found = {name: prod(shape) for name, shape in outline.parameters.items() if "bias" in name.rpartition(".")[2]}
    return sum(size for name, size in found.items() if section.bias == "all" or name.rpartition(".")[0] in adapted)
