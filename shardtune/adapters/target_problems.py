"""Which errors do invalid LoRA targets raise?"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardtune.adapters.ranks import rank_of, rank_setting
from shardtune.adapters.sites import Site, matches
from shardtune.config.schema import NO_DROPOUT, TARGET_WORDS, LoraSection
from shardtune.errors import UserInputError
from shardtune.model.families.family import Family

if TYPE_CHECKING:
    from shardtune.model.outline import Outline


def nothing_named() -> UserInputError:
    return UserInputError(
        "lora.target_modules is empty: nothing would train.", fix="Use [attention, mlp], all-linear, or module names."
    )


def nothing_trains(entries: list[str], family: Family, section: LoraSection) -> UserInputError:
    says = "is false" if section.experts is False else "is not set"
    return UserInputError(
        f"lora.target_modules ({', '.join(entries)}) would train nothing.",
        why=f"In {family.name} that selects only the routed experts, and lora.experts {says}.",
        fix="Set lora.experts: true (with lora_dropout: 0), or add attention to lora.target_modules.",
    )


def contradiction(entry: str) -> UserInputError:
    return UserInputError(
        f"lora.target_modules: '{entry}' selects the routed experts, but lora.experts is false.",
        fix=f"Remove lora.experts: false, or '{entry}'.",
    )


def no_such_layer(unknown: set[int], there: set[int]) -> UserInputError:
    names = ", ".join(map(str, sorted(unknown))) or "none"
    return UserInputError(
        f"lora.layers_to_transform lists layers that the model does not have: {names}.",
        why=f"Its decoder layers are {min(there)} to {max(there)}."
        if there
        else "Its decoder layers are not numbered.",
        fix="Choose from these, or remove lora.layers_to_transform.",
    )


def nothing_excluded(entry: str) -> UserInputError:
    return UserInputError(
        f"lora.exclude_modules: '{entry}' matches nothing that could get an adapter.",
        fix="Correct or remove it. (Embeddings, norms and the output head never get one.)",
    )


def check_dora(sites: Mapping[str, Site], section: LoraSection) -> None:
    tensors = [site for site in sites.values() if site.is_parameter]
    if section.use_dora and tensors:
        raise no_dora(tensors[0].name)


def no_dora(name: str) -> UserInputError:
    return UserInputError(
        f"lora.use_dora: '{name}' is a fused tensor or a router, for which PEFT does not support DoRA.",
        fix="Remove it from lora.target_modules, or set lora.use_dora: false and a higher r with use_rslora: true.",
    )


def check_ranks(sites: Mapping[str, Site], section: LoraSection) -> None:
    """A rank beyond the smaller side of a matrix only costs memory; it is never what was meant."""
    over = [(site, rank) for site in sites.values() if (rank := rank_of(site, section)) > site.largest_rank]
    if not over:
        return
    site, rank = min(over, key=lambda pair: pair[0].largest_rank)
    key = rank_setting(site, section)
    shape = " × ".join(str(side) for side in site.shape)
    others = f" ({len(over) - 1} more layers are too small as well.)" if len(over) > 1 else ""
    raise UserInputError(
        f"{key} is {rank}, but '{site.name}' is {shape}: a rank above {site.largest_rank} adds nothing there." + others,
        why="The update B·A of a matrix has at most the rank of its smaller side.",
        fix=f"Set {key} to {site.largest_rank} or less, or remove the layer from lora.target_modules.",
    )


def check_dropout(sites: Mapping[str, Site], section: LoraSection) -> None:
    tensors = [site for site in sites.values() if site.is_parameter]
    if section.lora_dropout > 0 and tensors:
        raise no_dropout(tensors[0].name, section.lora_dropout)


def no_dropout(name: str, dropout: float) -> UserInputError:
    return UserInputError(
        f"lora.lora_dropout is {dropout:g}, but '{name}' can only be adapted without dropout.",
        why=NO_DROPOUT[0].upper() + NO_DROPOUT[1:] + " (PEFT's target_parameters).",
        fix="Set lora.lora_dropout: 0, or remove the layer from lora.target_modules.",
    )


def no_match(outline: Outline, entry: str, sites: Iterable[Site]) -> UserInputError:
    """Says what the entry is, if it is anything, the nearest name, and everything there is."""
    sites = list(sites)
    linear = Counter(site.name.rpartition(".")[2] for site in sites if not site.is_parameter)
    tensors = Counter(".".join(site.name.split(".")[-2:]) for site in sites if site.is_parameter)
    there = f"Its linear layers are: {_listing(linear)}."
    if tensors:
        there += f" Fused experts and routers: {_listing(tensors)}."
    if entry in TARGET_WORDS:
        return UserInputError(
            f"lora.target_modules: '{entry}' matches nothing in {outline.model_class}.",
            why=f"The model has no {entry.replace('-', ' ')} that could take an adapter.",
            fix=there,
        )
    return UserInputError(
        f"lora.target_modules: '{entry}' matches no linear layer of {outline.model_class}.",
        why=_what_it_is(outline, entry) or _nearest(entry, [*linear, *tensors, *TARGET_WORDS]),
        fix=f"{there} Words: {', '.join(TARGET_WORDS)}.",
    )


def _what_it_is(outline: Outline, entry: str) -> str:
    other = [name for name in outline.modules or outline.owners if matches(entry, name)]
    if not other:
        return ""
    if other[0] == outline.head:
        return f"'{entry}' is the output head; the loss reads its weight directly, so an adapter would never train."
    if other[0] in outline.linear:
        return f"'{entry}' is never called: the model reads its weight directly, so an adapter would never train."
    kind = f" of class {outline.modules[other[0]]}" if outline.modules else ""
    return f"'{entry}' matches {len(other)} module(s){kind}, which is not a linear layer."


def _nearest(entry: str, known: list[str]) -> str:
    near = difflib.get_close_matches(entry, known, n=3)
    if not near:
        return ""
    return "Did you mean " + " or ".join(f"'{name}'" for name in near) + "?"


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{name} (×{count})" for name, count in counts.items()) or "none"
