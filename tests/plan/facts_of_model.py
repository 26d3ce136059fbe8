"""Facts of a model that exists as a config alone, for tests of the plan's arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from shardtune.adapters.ranks import rank_of
from shardtune.adapters.targets import resolve_targets
from shardtune.config.schema import LoraSection
from shardtune.model.families.registry import family_for
from shardtune.parallel.shard import decoder_layers
from shardtune.plan.facts import Facts, LayerKind, Machine

H200 = Machine(device="cuda", memory=150_121_414_656, processes_here=1, nodes=(1,), gpu="NVIDIA H200")


def facts_of_model(config: dict[str, Any], lora: LoraSection | None = None, machine: Machine = H200) -> Facts:
    """Of the model of this config.json, built on the meta device with its layers cut to one and counted again."""
    given = dict(config)
    model_type = given.pop("model_type")
    family = family_for(model_type)
    assert family is not None
    count = int(config["num_hidden_layers"])
    built = transformers.AutoConfig.for_model(model_type, **given | {"num_hidden_layers": 1})
    with torch.device("meta"):
        model = getattr(transformers, family.causal_lm[model_type])._from_config(built, dtype=torch.bfloat16)
    (layer,) = decoder_layers(model, family.decoder_layer.get(model_type))
    (prefix,) = (name for name, module in model.named_modules() if module is layer)
    section = lora or LoraSection(r=16, lora_dropout=0.0)
    sites = resolve_targets(model, section, family).sites
    adapted = {name.removeprefix(f"{prefix}."): rank_of(site, section) for name, site in sites.items()}
    inside = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    trained = sum(_adapter(site.shape, adapted[name.removeprefix(f"{prefix}.")]) for name, site in sites.items())
    root = {n: tuple(p.shape) for n, p in model.named_parameters() if not n.startswith(f"{prefix}.")}
    return Facts(
        machine=machine, model_type=model_type, model_class=type(model).__name__, model=built.to_dict(),
        dtype="bfloat16", kinds=(LayerKind(count, inside, frozenset(), adapted),), root=root, trained=trained * count,
        layer_class=type(layer).__name__, module_classes=frozenset(), own_attention="sdpa", attention_dropout=False,
        full_attention=True, missing={}, unsupported={}, loss_obstacle=None, router_coefficient=0.0,
        unused_router_loss=None, fill_share=lambda: 1.0,
    )  # fmt: skip


def _adapter(shape: tuple[int, ...], rank: int) -> int:
    *experts, rows, columns = shape
    return rank * (rows + columns) * (experts[0] if experts else 1)
