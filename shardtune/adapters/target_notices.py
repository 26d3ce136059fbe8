"""What should the user know about how the LoRA targets were resolved? One sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardtune.adapters.sites import Site
from shardtune.config.schema import LoraSection
from shardtune.model.families.family import Family

if TYPE_CHECKING:
    from shardtune.adapters.targets import Reading
    from shardtune.model.outline import Outline


def all_notices(
    outline: Outline,
    section: LoraSection,
    sites: dict[str, Site],
    taken: dict[str, Site],
    readings: list[Reading],
) -> list[str]:
    family = outline.family
    return [
        *_inspected(family, sites, readings),
        *_translated(family, readings),
        *_left_untouched(outline, section, readings, taken),
        *_without_effect(section, family, sites, taken, readings),
    ]


def _inspected(family: Family, sites: dict[str, Site], readings: list[Reading]) -> Iterator[str]:
    """What was found where nobody has written it down, and what hangs on that."""
    if family.inspected:
        parts = {"attention": family.attention, "mlp": (*family.mlp, *family.shared_experts), "experts": family.experts}
        found = "; ".join(f"{part} = {_last_parts(names)}" for part, names in parts.items() if names)
        yield (
            f"{family.name} has no family file (docs/families.md); its layers were inspected: {found or 'none found'}. "
            "The line `trains` lists what gets adapters (-v: in detail). Packing, torch.compile, the fused loss and "
            "grouped experts are off, because they have not been tested for this architecture."
        )
        yield from (f"{family.name}: {doubt}" for doubt in family.doubts)
    elif any(reading.is_word or reading.translated for reading in readings):
        others = (site.below for site in sites.values() if site.role == "other" and site.below)
        unknown = _last_parts(name for name in others if name not in family.other)
        if unknown:
            yield f"The family file of {family.name} does not list {unknown}: select it by its name or all-linear."


def _translated(family: Family, readings: list[Reading]) -> Iterator[str]:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for reading in readings:
        if reading.translated:
            grouped.setdefault(reading.translated, []).append(reading.entry)
    if grouped:
        said = "; ".join(f"{', '.join(names)} → {', '.join(meant)}" for meant, names in grouped.items())
        yield f"lora.target_modules uses names of other architectures; in {family.name} they resolve to {said}."


def _left_untouched(
    outline: Outline, section: LoraSection, readings: list[Reading], taken: dict[str, Site]
) -> Iterator[str]:
    """What `lora.experts` was not asked about: nearly all of a large mixture of experts."""
    left = {site.name: site for reading in readings for site in reading.withheld if site.name not in taken}.values()
    if section.experts is not None or not left:
        return
    size = sum(site.size for site in left)
    share = size / outline.size
    if outline.expert_obstacle is not None:
        yield (
            f"The routed experts get no adapter: {compact(size)} parameters, {share:.0%} of the model, stay frozen. "
            f"They cannot be adapted: {outline.expert_obstacle}. lora.experts: false silences this notice."
        )
        return
    rank = section.expert_r or section.r
    adapters = sum(rank * (site.size // site.shape[-2] + site.size // site.shape[-1]) for site in left)
    yield (
        f"The routed experts get no adapter, because lora.experts is not set: {compact(size)} parameters, {share:.0%} "
        f"of the model, stay frozen. lora.experts: true adapts them too ({compact(adapters)} trainable parameters at "
        f"rank {rank}); false silences this notice."
    )


def _without_effect(
    section: LoraSection, family: Family, sites: dict[str, Site], taken: dict[str, Site], readings: list[Reading]
) -> Iterator[str]:
    adapted = any(site.role == "experts" for site in taken.values())
    if section.experts is True and not adapted:
        if any(site.role == "experts" for site in sites.values()):
            yield "lora.experts has no effect: no entry of lora.target_modules selects the experts; add mlp or experts."
        else:
            yield f"lora.experts has no effect: {family.name} has no routed experts."
    for key in ("expert_r", "expert_alpha"):
        if getattr(section, key) is not None and not adapted:
            yield f"lora.{key} has no effect: no routed expert is adapted."
    for reading in readings:
        if section.experts is False and not reading.taken:
            yield (
                f"lora.target_modules: '{reading.entry}' has no effect: in {family.name} it selects the routed "
                "experts, and lora.experts is false."
            )


def compact(number: int) -> str:
    """27.5M, 1.06B; below a million every digit."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,}"


def _last_parts(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
