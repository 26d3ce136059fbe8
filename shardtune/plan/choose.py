"""Which batch, recomputation, offloading, sharding and precision? The fastest that fits, and why not another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING

from shardtune.config.batch import effective_batch
from shardtune.errors import UserInputError
from shardtune.plan import sharding
from shardtune.plan.catalogue import shipped_cluster
from shardtune.plan.host import host_memory
from shardtune.plan.memory import gpu_memory, usable
from shardtune.plan.step_time import step_time
from shardtune.plan.work import Checkpointing, Work, work_of
from shardtune.terminal import count, size

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.plan.catalogue import Cluster
    from shardtune.plan.facts import Facts

_ORDER: tuple[Checkpointing, ...] = ("none", "selective", "full")
_AS_GOOD = 1.01  # what is at most this much slower than the fastest counts as fast: the simpler or smaller one is taken
_WORTH_SHARDING = 1.05  # less is not worth the links' traffic, whose speed is taken from data sheets
# By how much an estimate may be wrong (docs/plan.md): what needs more than the memory times this cannot fit.
_SURE = 1.08
_SPACIOUS = 0.7  # of the memory: what needs less leaves room for what the estimate does not see
_BATCH = "train.per_device_train_batch_size"
_CHECKPOINTING = "train.gradient_checkpointing"
_GIVEN = (
    _CHECKPOINTING, _BATCH, "train.offload_activations", "parallel.shard",
    "parallel.reshard_after_forward", "parallel.offload_params",
)  # fmt: skip


_Why = str | Callable[[Work], str]  # a reason, or what a step's alternatives are called


@dataclass(frozen=True)
class Candidate:
    """One way to do a step."""

    facts: Facts
    config: RunConfig
    cluster: Cluster
    work: Work

    @cached_property
    def memory(self) -> int:
        return gpu_memory(self.facts, self.work).total

    @cached_property
    def seconds(self) -> float:
        return step_time(self.facts, self.work, self.cluster).seconds

    @cached_property
    def fits(self) -> bool:
        machine = self.facts.machine
        return self.memory <= usable(machine.memory, machine.device) and self.fits_host

    @cached_property
    def fits_host(self) -> bool:
        """What is offloaded, where it is known how much host memory there is."""
        most = self.facts.machine.host_memory
        if not any(self.offloads) or not most:
            return True
        return host_memory(self.facts, self.work, self.config).per_node <= most

    @property
    def offloads(self) -> tuple[bool, bool]:
        """Parameters, then activations."""
        return self.work.offload_params, self.work.offload_activations

    @property
    def simplicity(self) -> tuple[object, ...]:
        """Of two that are as fast, the one with less communication and recomputation."""
        work = self.work
        # Larger micro-batches are faster where the host is slow, which nobody knows; smaller ones leave more memory.
        spacious = self.memory <= _SPACIOUS * self.facts.machine.memory
        batch = -work.batch if spacious else work.batch
        return (work.shards, _ORDER.index(work.checkpointing), work.fp8, work.reshard, not spacious, batch)


def candidates(config: RunConfig, facts: Facts) -> list[Candidate]:
    """Every way to do a step that the settings leave open."""
    given, cluster = work_of(config, facts), shipped_cluster(facts.machine)
    found = []
    for fp8, shards, checkpointing, batch in product(
        _precisions(config, facts), _shards(config, facts), _recomputations(config, facts), _batches(config, given)
    ):
        accumulation = given.batch * given.accumulation // batch
        own = replace(
            given, fp8=fp8, shards=shards, checkpointing=checkpointing, batch=batch, accumulation=accumulation
        )
        for params, inputs in product(_offloads_params(config, facts, shards), _offloads(config, facts, checkpointing)):
            for reshard in _reshards(config, shards, params):
                work = replace(own, offload_params=params, offload_activations=inputs, reshard=reshard)
                found.append(Candidate(facts, config, cluster, work))
    return found


def fastest(found: Sequence[Candidate]) -> Candidate:
    """The fastest that fits; the one that needs the least memory where none does."""
    offloads = sorted({one.offloads for one in found})
    # Offloading is for what fits no other way: how much of the copying computation hides depends on the host.
    fitting = next(filter(None, ([one for one in found if one.offloads == how and one.fits] for how in offloads)), None)
    if fitting is None:
        return min(found, key=lambda one: (not one.fits_host, one.memory))
    if found[0].facts.machine.device == "cpu":  # its rates are too coarse to go by
        return min(fitting, key=lambda one: one.simplicity)
    best = min(one.seconds for one in fitting)
    shards = min(one.work.shards for one in fitting if one.seconds <= _WORTH_SHARDING * best)
    least = [one for one in fitting if one.work.shards == shards]
    best = min(one.seconds for one in least)
    return min((one for one in least if one.seconds <= _AS_GOOD * best), key=lambda one: one.simplicity)


def refuse_what_cannot_fit(chosen: Candidate) -> None:
    """Raise where even the least memory is more than there is, by more than the estimate can be wrong.

    Raises:
        UserInputError: with what is missing and the nearest settings that would fit.
    """
    machine, found = chosen.facts.machine, gpu_memory(chosen.facts, chosen.work)
    needed = found.total
    # On a CPU, and for a family that is not in the table, the estimate is too coarse for a verdict.
    if machine.device == "cpu" or found.known_by == "estimated" or needed <= _SURE * machine.memory:
        return
    raise UserInputError(
        f"The run does not fit: it needs {size(needed)} per GPU, and there are {size(machine.memory)}.",
        why=f"Counted with {_described(chosen.work)}; {_largest(chosen)}.",
        fix=f"{_nearest(chosen)} `shardtune plan CONFIG --compare` lists more; guards.memory_plan: warn tries anyway.",
        code="does-not-fit",
    )


def choices(config: RunConfig, facts: Facts) -> Iterator[tuple[str, object, str]]:
    """A value and its reason for everything that is `auto`."""
    found = candidates(config, facts)
    chosen = fastest(found)
    if config.guards.memory_plan == "refuse":
        refuse_what_cannot_fit(chosen)
    reasons = _Reasons(found, chosen)
    for path, value, why in _values(chosen):
        yield path, value, why if isinstance(why, str) else reasons(why)


def full_reshards(config: RunConfig, facts: Facts) -> bool:
    """Whether full sharding would free gathered weights after each forward pass."""
    asked = config.parallel.reshard_after_forward
    if asked != "auto":
        return asked
    work = replace(work_of(config, facts), shards=facts.machine.world_size, reshard=False)
    return not Candidate(facts, config, shipped_cluster(facts.machine), work).fits


def _values(chosen: Candidate) -> Iterator[tuple[str, object, _Why]]:
    """What each `auto` comes to, with its reason or what its alternatives are called."""
    config, facts, work = chosen.config, chosen.facts, chosen.work
    train, parallel, ranks = config.train, config.parallel, facts.machine.world_size
    if config.model.base_precision == "auto":
        reason: _Why = _precision if facts.quantised else "the checkpoint is not quantised"
        yield "model.base_precision", _precision(work), reason
    if parallel.shard == "auto":
        offloaded = "parallel.offload_params keeps weights in host memory, which a node's processes share"
        named = partial(_shard_text, ranks=ranks)
        yield (
            "parallel.shard",
            _shard_word(work.shards, ranks),
            ("one process" if ranks == 1 else offloaded if work.offload_params else named),
        )
        if 1 < work.shards < ranks:
            yield "parallel.shard_size", work.shards, named
        yield from _without_effect(config, _shard_word(work.shards, ranks))
    if parallel.reshard_after_forward == "auto" and work.shards > 1:
        reason = "parallel.offload_params is true" if work.offload_params else lambda one: _word(one.reshard)
        yield "parallel.reshard_after_forward", work.reshard, reason
    on_cpu = "no effect on a CPU" if facts.machine.device == "cpu" else ""
    if parallel.offload_params == "auto":
        yield "parallel.offload_params", work.offload_params, on_cpu or (lambda one: _word(one.offload_params))
    if train.gradient_checkpointing == "auto":
        value = {"none": False, "full": True}.get(work.checkpointing, work.checkpointing)
        yield _CHECKPOINTING, value, lambda one: one.checkpointing
    if train.offload_activations == "auto":
        kept = "" if work.checkpointing == "full" else f"gradient_checkpointing is {work.checkpointing}"
        reason = on_cpu or kept or (lambda one: _word(one.offload_activations))
        yield "train.offload_activations", work.offload_activations, reason
    if train.per_device_train_batch_size == "auto":
        yield _BATCH, work.batch, lambda one: count(one.batch, "row")
    if train.gradient_accumulation_steps == "auto":
        rows = f"{count(work.batch * work.accumulation, 'row')} per process and step, {work.batch} at a time"
        yield "train.gradient_accumulation_steps", work.accumulation, rows


def warning(config: RunConfig, facts: Facts) -> str | None:
    """Said of settings that may run out of memory."""
    chosen = Candidate(facts, config, shipped_cluster(facts.machine), work_of(config, facts))
    if chosen.fits:
        return None
    most = usable(facts.machine.memory, facts.machine.device)
    return (
        f"The run may run out of memory: about {size(chosen.memory)} per "
        f"{'GPU' if facts.machine.device == 'cuda' else 'process'}, of {size(most)} usable "
        "(`shardtune plan CONFIG --compare` lists what fits)."
    )


class _Reasons:
    """Why one value of a setting was taken and not another: what the best with each other value comes to."""

    def __init__(self, found: Sequence[Candidate], chosen: Candidate) -> None:
        self.found, self.chosen = found, chosen

    def __call__(self, value_of: Callable[[Work], str]) -> str:
        own, by_value = value_of(self.chosen.work), dict[str, list[Candidate]]()
        for one in self.found:
            by_value.setdefault(value_of(one.work), []).append(one)
        machine = self.chosen.facts.machine
        best = {value: fastest(some) for value, some in by_value.items() if value != own}
        # A CPU's speed is not known.
        also = [value for value, one in best.items() if one.fits] if machine.device == "cpu" else []
        others = [self._against(value, one) for value, one in best.items() if value not in also]
        if also:
            others.append(f"{', '.join(also[:-1])}{' and ' if also[1:] else ''}{also[-1]} would fit as well")
        needed, most = size(self.chosen.memory), size(usable(machine.memory, machine.device))
        verdict = "it fits" if machine.device == "cpu" else "the fastest that fits"
        head = f"{verdict if self.chosen.fits else 'the least memory'}: about {needed} of {most} usable"
        return "; ".join([head, *others])

    def _against(self, value: str, other: Candidate) -> str:
        if not other.fits:
            return f"{value}: needs {size(other.memory)}"
        slower = other.seconds / self.chosen.seconds - 1
        return f"{value}: {100 * slower:.0f} % slower" if slower > _AS_GOOD - 1 else f"{value}: as fast"


def _precisions(config: RunConfig, facts: Facts) -> list[bool]:
    """Only what is stored in float8 is held in it by `auto`: rounding a base is the user's decision."""
    if config.model.base_precision != "auto":
        return [config.model.base_precision == "fp8"]
    if not facts.quantised:
        return [False]
    return [True] if config.train.fp8_compute is True else [False, True]


def _shards(config: RunConfig, facts: Facts) -> list[int]:
    if config.parallel.shard == "auto":
        return list(sharding.group_sizes(facts.machine.nodes))
    return [work_of(config, facts).shards]


def _recomputations(config: RunConfig, facts: Facts) -> list[Checkpointing]:
    train = config.train
    if train.gradient_checkpointing != "auto":
        return [work_of(config, facts).checkpointing]
    if train.offload_activations is True:
        return ["full"]
    return ["none", "full"] if "selective" in facts.missing else list(_ORDER)


def _batches(config: RunConfig, given: Work) -> list[int]:
    """Divisors of a process's rows per step."""
    if config.train.per_device_train_batch_size != "auto" or config.train.gradient_accumulation_steps != "auto":
        return [given.batch]
    rows = given.batch * given.accumulation
    return [some for some in range(1, rows + 1) if rows % some == 0]


def _offloads_params(config: RunConfig, facts: Facts, shards: int) -> list[bool]:
    asked = config.parallel.offload_params
    if facts.machine.device == "cpu":
        return [False]
    whole = shards == facts.machine.world_size or config.parallel.shard != "auto"
    if asked == "auto":
        return [False, True] if whole else [False]
    return [asked] if whole or not asked else []


def _offloads(config: RunConfig, facts: Facts, checkpointing: Checkpointing) -> list[bool]:
    asked = config.train.offload_activations
    if facts.machine.device == "cpu" or checkpointing != "full":
        return [False]
    return [False, True] if asked == "auto" else [asked]


def _reshards(config: RunConfig, shards: int, offloaded: bool) -> list[bool]:
    asked = config.parallel.reshard_after_forward
    if asked != "auto":
        return [asked]
    return [True] if shards == 1 or offloaded else [False, True]


def _without_effect(config: RunConfig, chosen: str) -> Iterator[tuple[str, object, str]]:
    """What would be refused beside the value that `auto` came to: the run's own config must be one that can be run."""
    if chosen == "replicate" and config.parallel.reshard_after_forward != "auto":
        yield "parallel.reshard_after_forward", "auto", "no effect: no frozen weight is gathered"
    if chosen == "full" and config.model.load == "read-once":
        yield "model.load", "auto", "read-once has no effect: there is one replica of the base"
    if chosen == "full" and config.guards.replica_check_steps:
        yield "guards.replica_check_steps", 0, "no effect: there is one replica of the base"


def _shard_word(shards: int, ranks: int) -> str:
    return "replicate" if shards == 1 else "full" if shards == ranks else "hybrid"


def _shard_text(work: Work, *, ranks: int) -> str:
    word = _shard_word(work.shards, ranks)
    return f"hybrid of {work.shards}" if word == "hybrid" else word


def _precision(work: Work) -> str:
    return "fp8" if work.fp8 else "bf16"


def _word(flag: bool) -> str:
    return "true" if flag else "false"


def _described(work: Work) -> str:
    parts = [f"{work.batch} × {work.length} tokens", f"gradient_checkpointing: {work.checkpointing}"]
    parts += ["offloaded activations"] * work.offload_activations + ["offloaded parameters"] * work.offload_params
    parts += [f"the base in FP8 over {work.shards} GPUs" if work.fp8 else f"the base over {work.shards} GPUs"]
    return ", ".join(parts)


def _largest(chosen: Candidate) -> str:
    parts = gpu_memory(chosen.facts, chosen.work).parts()
    first, second, *_ = sorted(parts, key=lambda name: -parts[name])
    return f"most of it is {first} ({size(parts[first])}) and {second} ({size(parts[second])})"


def _nearest(chosen: Candidate) -> str:
    """What would have to change, each on its own: a setting that was given, the length, the precision, the GPUs."""
    config, facts = chosen.config, chosen.facts
    found = [text for text in map(partial(_opened, config, facts), _GIVEN) if text]
    length = next((n for n in _halves(config.data.max_length) if _with(config, facts, "data.max_length", n).fits), None)
    found += [f"data.max_length: {length}"] if length else []
    if not chosen.work.fp8 and _with(config, facts, "model.base_precision", "fp8").fits:
        found.append("model.base_precision: fp8")
    for ranks in (facts.machine.world_size * 2**power for power in range(1, 8)):
        machine = replace(facts.machine, nodes=_grown(facts.machine.nodes, ranks))
        if _best(config, replace(facts, machine=machine)).fits:
            found.append(f"{ranks} such GPUs")
            break
    return f"Nearest that fit: {'; or '.join(found)}." if found else "Use larger GPUs or a smaller model."


def _opened(config: RunConfig, facts: Facts, path: str) -> str:
    """The value that `auto` would give a setting, where the run fits with it."""
    section, _, key = path.partition(".")
    if getattr(getattr(config, section), key) == "auto":
        return ""
    best = _with(config, facts, path, "auto")
    if not best.fits:
        return ""
    values = {choice: value for choice, value, _ in _values(best)}
    words = {"True": "full", "False": "none"} if path == _CHECKPOINTING else {}
    value = str(values.get(path))
    return f"{path}: {words.get(value, value.lower())}" if path in values else ""


def _halves(length: int) -> Iterator[int]:
    while (length := length // 2) >= 128:
        yield length


def _grown(nodes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """As many full nodes as that takes; nodes have up to eight GPUs."""
    per_node = max(max(nodes), min(8, ranks))
    return (per_node,) * max(1, ranks // per_node)


def _with(config: RunConfig, facts: Facts, path: str, value: object) -> Candidate:
    section, _, key = path.partition(".")
    values = {key: value}
    if path == _BATCH:  # the effective batch stays
        rows = effective_batch(config.train, facts.machine.world_size)
        values |= {"gradient_accumulation_steps": "auto", "effective_batch_size": rows}
    changed = getattr(config, section).model_copy(update=values)
    return _best(config.model_copy(update={section: changed}), facts)


def _best(config: RunConfig, facts: Facts) -> Candidate:
    return fastest(candidates(config, facts))
