"""How is PEFT configured to adapt exactly these sites? The shortest config that does, and the check that it did."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from peft import LoraConfig
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

from shardtune.adapters.new_tokens import token_indices
from shardtune.adapters.ranks import Number, alpha_of, rank_of, scale_of
from shardtune.adapters.sites import Site
from shardtune.adapters.target_problems import no_dora, no_dropout
from shardtune.config.schema import LoraSection
from shardtune.errors import ShardtuneError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def peft_config(
    model: PreTrainedModel,
    section: LoraSection,
    sites: dict[str, Site],
    new_tokens: Sequence[int],
    saved: Sequence[str],
) -> LoraConfig:
    """PEFT's config for adapters on these sites, with names as short as they can be while meaning nothing else.

    Args:
        new_tokens: Ids of tokens whose rows train.
        saved: Modules that train in full.

    Raises:
        UserInputError: a linear module that PEFT can only address by its weight, while dropout or DoRA is on.
    """
    modules = [name for name, site in sites.items() if not site.is_parameter]
    short = shortest_suffixes(modules, [name for name, _ in model.named_modules()], parts=1)
    refused = {suffix for suffix in short if _is_rewritten(model, suffix)}
    by_weight = [f"{name}.weight" for name in modules if any(_ends(name, suffix) for suffix in refused)]
    if by_weight and section.lora_dropout > 0:
        raise no_dropout(by_weight[0].removesuffix(".weight"), section.lora_dropout)
    if by_weight and section.use_dora:
        raise no_dora(by_weight[0].removesuffix(".weight"))
    parameters = [name for name, site in sites.items() if site.is_parameter] + by_weight
    every_parameter = [name for name, _ in model.named_parameters()]
    config = LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=[suffix for suffix in short if suffix not in refused],
        target_parameters=shortest_suffixes(parameters, every_parameter, parts=2) or None,
        bias=section.bias,
        task_type=section.task_type,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        init_lora_weights=section.init_lora_weights,
        modules_to_save=_saved_names(model, saved) or None,
        trainable_token_indices=token_indices(model, new_tokens) if new_tokens else None,
    )
    # The name that PEFT sees: of the weight, where it addresses that.
    seen = {f"{name}.weight" if f"{name}.weight" in by_weight else name: site for name, site in sites.items()}
    names = [*every_parameter, *modules]
    config.rank_pattern = _pattern({name: rank_of(site, section) for name, site in seen.items()}, section.r, names)
    config.alpha_pattern = _pattern(
        {name: alpha_of(site, section) for name, site in seen.items()}, section.lora_alpha, names
    )
    return config


def _saved_names(model: PreTrainedModel, saved: Sequence[str]) -> list[str]:
    """PEFT compares ends of names as text, not part by part: `norm` would mean `input_layernorm` too."""
    names = [name for name, _ in model.named_modules()]
    short = shortest_suffixes(saved, names, parts=1)
    reached = {name for name in names if any(name.endswith(suffix) for suffix in short)}
    return short if reached == set(saved) else list(saved)


def _pattern(values: dict[str, Number], usual: Number, names: Iterable[str]) -> dict[str, Number]:
    """What differs from the usual value, by ends of names that match nothing else."""
    found: dict[str, Number] = {}
    for value in dict.fromkeys(values.values()):
        if value != usual:
            own = [name for name, one in values.items() if one == value]
            found |= dict.fromkeys(shortest_suffixes(own, [*names, *values], parts=2), value)
    return found


def shortest_suffixes(wanted: Iterable[str], names: Iterable[str], *, parts: int) -> list[str]:
    """Ends of dotted names that match all of `wanted` and nothing else of `names`, each of at least `parts` parts."""
    chosen = set(wanted)
    endings: dict[str, bool] = {}  # ending -> does everything that ends so belong to what is wanted?
    for name in {*names, *chosen}:
        pieces = name.split(".")
        for start in range(len(pieces)):
            ending = ".".join(pieces[start:])
            endings[ending] = endings.get(ending, True) and name in chosen
    found = set()
    for name in chosen:
        pieces = name.split(".")
        longest_first = [".".join(pieces[start:]) for start in range(max(1, len(pieces) - parts + 1))]
        found.add(next((ending for ending in reversed(longest_first) if endings[ending]), name))
    return sorted(found)


def adapted_ranks(adapted: PeftModel) -> dict[str, tuple[int, float]]:
    """Rank and scale of every adapter PEFT has made, by the name of the module or parameter it is on."""
    found = {}
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            base = name.removeprefix("base_model.model.").replace(".base_layer", "")
            key = f"{base}.{module.parameter_name}" if isinstance(module, ParamWrapper) else base
            found[key] = (module.r["default"], module.scaling["default"])
    return found


def check_as_meant(adapted: PeftModel, section: LoraSection, sites: dict[str, Site]) -> None:
    """PEFT matches by the ends of names and rewrites some: what it did is compared with what was meant.

    Raises:
        ShardtuneError: an adapter is missing, not asked for, or of another rank or scale.
    """
    done = adapted_ranks(adapted)
    by_weight = {name.removesuffix(".weight"): name for name in done}
    # A linear module may have been adapted by its weight; either way it is the same matrix.
    named = {name: (name if name in done else by_weight.get(name, name)) for name in sites}
    meant = {named[name]: (rank_of(site, section), scale_of(site, section)) for name, site in sites.items()}
    missing, surplus = sorted(set(meant) - set(done)), sorted(set(done) - set(meant))
    other = sorted(name for name in set(meant) & set(done) if not _alike(meant[name], done[name]))
    if missing or surplus or other:
        raise ShardtuneError(
            "PEFT's adapters do not match lora.target_modules.",
            why=f"Missing: {missing[:5] or 'none'}; unexpected: {surplus[:5] or 'none'}; with another rank or scale: "
            f"{other[:5] or 'none'}.",
            fix="Please report this with the config; full module names avoid it.",
        )


def _alike(one: tuple[int, float], other: tuple[int, float]) -> bool:
    return one[0] == other[0] and math.isclose(one[1], other[1])


def _is_rewritten(model: PreTrainedModel, suffix: str) -> bool:
    """Does PEFT take this name for one of transformers 4 and adapt something else (fused experts) in its place?

    It does so for mixtures of experts that were stored unfused: there `gate_proj` of a dense layer or a shared expert
    cannot be said by name. PEFT's own conversion answers; it refuses half of a fused pair, which is a yes as well.
    """
    asked = LoraConfig(target_modules=[suffix])
    converted = copy.deepcopy(asked)
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError:
        return True
    return set(converted.target_modules or ()) != {suffix}


def _ends(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")
