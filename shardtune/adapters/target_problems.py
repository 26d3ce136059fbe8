"""What is said when LoRA targets cannot be had as they are written?"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from shardtune.adapters.ranks import rank_of, rank_setting
from shardtune.adapters.sites import Site, matches
from shardtune.config.schema import NO_DROPOUT, TARGET_WORDS, LoraSection
from shardtune.errors import UserInputError
from shardtune.model.families.family import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def nothing_named() -> UserInputError:
    return UserInputError(
        "lora.target_modules is empty: nothing would train.", fix="Use [attention, mlp], all-linear, or name modules."
    )


def nothing_trains(entries: list[str], family: Family, section: LoraSection) -> UserInputError:
    says = "is false" if section.experts is False else "is not set"
    return UserInputError(
        f"lora.target_modules ({', '.join(entries)}) would train nothing.",
        why=f"In {family.name} that means the routed experts alone, and lora.experts {says}.",
        fix="Set lora.experts: true (with lora_dropout: 0), or add attention to lora.target_modules.",
    )


def contradiction(entry: str) -> UserInputError:
    return UserInputError(
        f"lora.target_modules: '{entry}' names the routed experts, but lora.experts is false.",
        fix=f"Remove lora.experts: false, or '{entry}'.",
    )


def no_such_layer(unknown: set[int], there: set[int]) -> UserInputError:
    names = ", ".join(map(str, sorted(unknown))) or "none"
    return UserInputError(
        f"lora.layers_to_transform names layers that the model does not have: {names}.",
        why=f"Its decoder layers are {min(there)} to {max(there)}."
        if there
        else "Its decoder layers are not numbered.",
        fix="Name some of these, or remove lora.layers_to_transform.",
    )


def nothing_excluded(entry: str) -> UserInputError:
    return UserInputError(
        f"lora.exclude_modules: '{entry}' matches nothing that could get an adapter.",
        fix="Correct it, or remove it. (Embeddings, norms and the output head never get one.)",
    )


def check_dora(sites: Mapping[str, Site], section: LoraSection) -> None:
    tensors = [site for site in sites.values() if site.is_parameter]
    if section.use_dora and tensors:
        raise no_dora(tensors[0].name)


def no_dora(name: str) -> UserInputError:
    return UserInputError(
        f"lora.use_dora: '{name}' is a fused tensor or a router, which PEFT has no DoRA for.",
        fix="Leave it out of lora.target_modules, or set lora.use_dora: false and a higher r with use_rslora: true.",
    )


def check_ranks(sites: Mapping[str, Site], section: LoraSection) -> None:
    """A rank beyond the smaller side of a matrix only costs memory; it is never what was meant."""
    over = [(site, rank) for site in sites.values() if (rank := rank_of(site, section)) > site.largest_rank]
    if not over:
        return
    site, rank = min(over, key=lambda pair: pair[0].largest_rank)
    key = rank_setting(site, section)
    shape = " × ".join(str(side) for side in site.shape)
    others = f" ({len(over) - 1} more are too small as well.)" if len(over) > 1 else ""
    raise UserInputError(
        f"{key} is {rank}, but '{site.name}' is {shape}: a larger rank than {site.largest_rank} adds nothing there."
        + others,
        why="The update B·A of a matrix has at most the rank of its smaller side.",
        fix=f"Set {key} to {site.largest_rank} or less, or leave it out of lora.target_modules.",
    )


def check_dropout(sites: Mapping[str, Site], section: LoraSection) -> None:
    tensors = [site for site in sites.values() if site.is_parameter]
    if section.lora_dropout > 0 and tensors:
        raise no_dropout(tensors[0].name, section.lora_dropout)


def no_dropout(name: str, dropout: float) -> UserInputError:
    return UserInputError(
        f"lora.lora_dropout is {dropout:g}, but '{name}' can only be adapted without dropout.",
        why=NO_DROPOUT[0].upper() + NO_DROPOUT[1:] + " (PEFT's target_parameters).",
        fix="Set lora.lora_dropout: 0, or leave it out of lora.target_modules.",
    )


def no_match(model: PreTrainedModel, entry: str, sites: Iterable[Site]) -> UserInputError:
    """Says what the entry is, if it is anything, the nearest name, and everything there is."""
    sites = list(sites)
    linear = Counter(site.name.rpartition(".")[2] for site in sites if not site.is_parameter)
    tensors = Counter(".".join(site.name.split(".")[-2:]) for site in sites if site.is_parameter)
    there = f"Linear layers there are: {_listing(linear)}."
    if tensors:
        there += f" Fused experts and routers: {_listing(tensors)}."
    if entry in TARGET_WORDS:
        return UserInputError(
            f"lora.target_modules: '{entry}' matches nothing in {type(model).__name__}.",
            why=f"The model has no {entry.replace('-', ' ')} that could take an adapter.",
            fix=there,
        )
    return UserInputError(
        f"lora.target_modules: '{entry}' matches no linear layer of {type(model).__name__}.",
        why=_what_it_is(model, entry) or _nearest(entry, [*linear, *tensors, *TARGET_WORDS]),
        fix=f"{there} Words: {', '.join(TARGET_WORDS)}.",
    )


def _what_it_is(model: PreTrainedModel, entry: str) -> str:
    other = [module for name, module in model.named_modules() if name and matches(entry, name)]
    if not other:
        return ""
    if other[0] is model.get_output_embeddings():
        return (
            f"'{entry}' is the output head; TRL's loss multiplies by its weight directly, so an adapter never trains."
        )
    if isinstance(other[0], nn.Linear):
        return f"'{entry}' is never called: the model reads its weight directly, so an adapter never trains."
    return f"'{entry}' names {len(other)} module(s) of class {type(other[0]).__name__}, which is not a linear layer."


def _nearest(entry: str, known: list[str]) -> str:
    near = difflib.get_close_matches(entry, known, n=3)
    if not near:
        return ""
    return "Did you mean " + " or ".join(f"'{name}'" for name in near) + "?"


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{name} (×{count})" for name, count in counts.items()) or "none"
