"""How large is the adapter at a site, and how is it scaled? `r` and `lora_alpha`, unless the site has its own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from shardtune.adapters.sites import Site
from shardtune.config.schema import LoraSection
from shardtune.errors import UserInputError

Number = TypeVar("Number", int, float)


def rank_of(site: Site, section: LoraSection) -> int:
    """By `rank_pattern`; routed experts may have a rank of their own."""
    own = _of_pattern(section.rank_pattern, site)
    if own is not None:
        return own
    return section.expert_r if site.role == "experts" and section.expert_r is not None else section.r


def rank_setting(site: Site, section: LoraSection) -> str:
    """Which setting the rank of a site comes from."""
    if _of_pattern(section.rank_pattern, site) is not None:
        return "lora.rank_pattern"
    return "lora.expert_r" if site.role == "experts" and section.expert_r is not None else "lora.r"


def alpha_of(site: Site, section: LoraSection) -> float:
    """By `alpha_pattern`; routed experts as `expert_alpha` says, or with what gives them the scale of the others.

    Rank-stabilised LoRA divides by the root of the rank so that one alpha suits all ranks: there it stays the same.
    """
    own = _of_pattern(section.alpha_pattern, site)
    if own is not None:
        return own
    if site.role != "experts":
        return section.lora_alpha
    if section.expert_alpha is not None:
        return section.expert_alpha
    if section.expert_r is None or section.use_rslora:
        return section.lora_alpha
    return section.lora_alpha * section.expert_r / section.r


def scale_of(site: Site, section: LoraSection) -> float:
    """What the product B·A is multiplied with."""
    rank = rank_of(site, section)
    return alpha_of(site, section) / (math.sqrt(rank) if section.use_rslora else rank)


def check_patterns(sites: Iterable[Site], section: LoraSection) -> None:
    """Raise where a key of `rank_pattern` or `alpha_pattern` means no adapter, or is no regular expression."""
    adapted = list(sites)
    patterns: dict[str, Mapping[str, float]] = {
        "rank_pattern": section.rank_pattern,
        "alpha_pattern": section.alpha_pattern,
    }
    for setting, pattern in patterns.items():
        for key in pattern:
            try:
                found = any(_matches(key, site) for site in adapted)
            except re.error as error:
                raise UserInputError(
                    f"lora.{setting}: '{key}' is not a valid regular expression.", why=str(error)
                ) from error
            if not found:
                raise UserInputError(
                    f"lora.{setting}: '{key}' matches nothing that gets an adapter.",
                    why="A key is the end of a name (q_proj, layers.0.self_attn.q_proj) or a regular expression.",
                    fix="Correct it, or add the module to lora.target_modules.",
                )


def _of_pattern(pattern: Mapping[str, Number], site: Site) -> Number | None:
    """The first key that matches counts, as in PEFT."""
    return next((value for key, value in pattern.items() if _matches(key, site)), None)


def _matches(key: str, site: Site) -> bool:
    return any(re.match(rf"(.*\.)?({key})$", name) for name in site.names)
