"""Which parts of the model does each LoRA target mean? Every entry must match, and what it matched can be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardtune.adapters import target_notices, target_problems
from shardtune.adapters.ranks import check_patterns
from shardtune.adapters.sites import Role, Site, matches, sites_of
from shardtune.config.schema import ALL_LINEAR, TARGET_WORDS, LoraSection, entries_of

if TYPE_CHECKING:
    from shardtune.model.outline import Outline

# The routed experts in these are taken when lora.experts says so; `experts` and `router` name what they mean.
_ROLES: dict[str, tuple[Role, ...]] = {
    "attention": ("attention",),
    "mlp": ("mlp", "shared-experts", "experts"),
    "shared-experts": ("shared-experts",),
    "experts": ("experts",),
    "all-linear": ("attention", "mlp", "shared-experts", "experts", "other"),
    "router": ("router",),
}


@dataclass(frozen=True)
class Target:
    """One entry of `lora.target_modules` and the full names of what it matched: modules, and parameters by name."""

    pattern: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolution:
    """What gets an adapter.

    Args:
        targets: By entry of `lora.target_modules`, in the order written.
        sites: All of them, by name.
        experts: Every routed expert tensor of the model, adapted or not.
        notices: What the user should know about how the entries were understood.
    """

    targets: list[Target]
    sites: dict[str, Site]
    experts: tuple[Site, ...]
    notices: list[str]


@dataclass(frozen=True)
class Reading:
    """What one entry means: the sites it reaches, the experts it would reach with lora.experts, and how it was read."""

    entry: str
    taken: tuple[Site, ...]
    withheld: tuple[Site, ...]
    translated: tuple[str, ...]

    @property
    def is_word(self) -> bool:
        return self.entry in TARGET_WORDS and self.entry != ALL_LINEAR


def resolve_targets(outline: Outline, section: LoraSection) -> Resolution:
    """What each entry of `lora.target_modules` means in this model, in the order written.

    A site two entries match counts for the first.

    Args:
        outline: Its family says which part is what, and what the names people copy mean here.
        section: Entries may be the words of `TARGET_WORDS`, module or parameter names (`q_proj`,
            `layers.0.self_attn.q_proj`, `experts.down_proj`), or regular expressions over full names.

    Raises:
        UserInputError: an entry matches nothing, nothing at all would train, a rank is larger than its layer, or
            dropout is asked for where it cannot be expressed.
    """
    entries = entries_of(section.target_modules)
    if not entries:
        raise target_problems.nothing_named()
    every = sites_of(outline)
    sites = _chosen(every, section)
    readings = [_read(outline, entry, sites, section) for entry in entries]
    targets, taken = [], dict[str, Site]()
    for reading in readings:
        new = [site for site in reading.taken if site.name not in taken]
        modules = tuple(site.name for site in new if not site.is_parameter)
        targets.append(Target(reading.entry, modules, tuple(site.name for site in new if site.is_parameter)))
        taken |= {site.name: site for site in new}
    if not taken:
        raise target_problems.nothing_trains(entries, outline.family, section)
    check_patterns(taken.values(), section)
    target_problems.check_ranks(taken, section)
    target_problems.check_dropout(taken, section)
    target_problems.check_dora(taken, section)
    notices = target_notices.all_notices(outline, section, sites, taken, readings)
    experts = tuple(site for site in every.values() if site.role == "experts")
    return Resolution(targets, taken, experts, notices)


def _chosen(sites: dict[str, Site], section: LoraSection) -> dict[str, Site]:
    """Those that `layers_to_transform` and `exclude_modules` leave."""
    asked = section.layers_to_transform
    if asked is not None:
        layers = {asked} if isinstance(asked, int) else set(asked)
        there = {site.layer for site in sites.values() if site.layer is not None}
        if not layers or not layers <= there:
            raise target_problems.no_such_layer(layers - there, there)
        sites = {name: site for name, site in sites.items() if site.layer in layers}
    for entry in entries_of(section.exclude_modules):
        left = {name: site for name, site in sites.items() if not any(matches(entry, one) for one in site.names)}
        if len(left) == len(sites):
            raise target_problems.nothing_excluded(entry)
        sites = left
    return sites


def _read(outline: Outline, entry: str, sites: dict[str, Site], section: LoraSection) -> Reading:
    if entry in TARGET_WORDS:
        matched = [site for site in sites.values() if site.role in _ROLES[entry]]
        return _with_experts(outline, entry, matched, sites, section, named=entry == "experts")
    literal = [site for site in sites.values() if any(matches(entry, name) for name in site.names)]
    meant = outline.family.aliases.get(entry)
    if meant is not None:
        reached = [site for site in sites.values() if site in literal or site.below in meant]
        reading = _with_experts(outline, entry, reached, sites, section, named=False)
        other = (site.below for site in reading.taken if site not in literal)
        return Reading(entry, reading.taken, reading.withheld, tuple(dict.fromkeys(other)))
    # A pattern that reaches anything else means that, and not the router by the way.
    chosen = [site for site in literal if site.role != "router"] or literal
    return _with_experts(outline, entry, chosen, sites, section, named=all(site.role == "experts" for site in chosen))


def _with_experts(
    outline: Outline, entry: str, matched: list[Site], sites: dict[str, Site], section: LoraSection, named: bool
) -> Reading:
    """Takes the routed experts among what matched when they are named, or asked for by lora.experts."""
    if not matched:
        raise target_problems.no_match(outline, entry, sites.values())
    experts = tuple(site for site in matched if site.role == "experts")
    if named and experts and section.experts is False:
        raise target_problems.contradiction(entry)
    if named or section.experts is True:
        return Reading(entry, tuple(matched), (), ())
    return Reading(entry, tuple(site for site in matched if site.role != "experts"), experts, ())
