"""Which other settings would do? Alternatives to a plan, each one that `train` accepts, the fastest that fits first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shardtune.config.cross_checks import cross_checks
from shardtune.config.schema import RunConfig
from shardtune.errors import UserInputError
from shardtune.plan import sharding
from shardtune.plan.memory import gpu_memory
from shardtune.plan.report import work_with
from shardtune.plan.resolve import resolve
from shardtune.plan.step_time import step_time
from shardtune.plan.work import work_of

if TYPE_CHECKING:
    from shardtune.plan.memory import GpuMemory
    from shardtune.plan.report import Plan
    from shardtune.plan.step_time import StepTime
    from shardtune.plan.work import Work

Changes = Mapping[str, object]  # by the path of a setting

_BATCH, _ACCUMULATION = "train.per_device_train_batch_size", "train.gradient_accumulation_steps"
_PRECISION, _FP8_COMPUTE = "model.base_precision", "train.fp8_compute"
_RECOMPUTED, _OFFLOAD = "train.gradient_checkpointing", "train.offload_activations"
_OFFLOAD_PARAMS = "parallel.offload_params"
_SHARD, _SHARD_SIZE, _RESHARD = "parallel.shard", "parallel.shard_size", "parallel.reshard_after_forward"
_AS_FAST = 1.01
_COMBINED = 6  # fastest combinations of several changes that are shown


@dataclass(frozen=True)
class Alternative:
    """Settings that differ from the plan's, and what they come to. No changes: the plan itself."""

    changes: Changes
    work: Work
    memory: GpuMemory
    time: StepTime
    usable: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable

    @property
    def over(self) -> int:
        """Bytes too many."""
        return max(0, self.memory.total - self.usable)

    def is_as_good_as(self, other: Alternative) -> bool:
        """As fast, with as little memory."""
        as_fast = self.time.seconds <= _AS_FAST * other.time.seconds
        return self.fits and as_fast and self.memory.total <= other.memory.total

    @cached_property
    def order(self) -> tuple[bool, float, int]:
        """Those that fit first, by speed; then by how much is missing."""
        return (not self.fits, -self.time.tokens_per_second if self.fits else float(self.over), len(self.changes))


def alternatives(plan: Plan) -> list[Alternative]:
    """The plan itself, every single change of it, and the fastest combinations that fit."""
    single = [_priced(plan, change) for axis in _axes(plan) for change in axis]
    found = [
        Alternative({}, plan.work, plan.memory, plan.time, plan.usable),
        *(one for one in single if _accepted(plan, one)),
    ]
    most = len(found) + _COMBINED
    for one in _fitting(plan):
        if len(found) == most:
            break
        if not any(other.is_as_good_as(one) for other in found) and _accepted(plan, one):
            found.append(one)
    return sorted(found, key=lambda one: one.order)


def nearest_that_fits(plan: Plan) -> Alternative | None:
    """The fastest settings that fit, with the same data, adapters and effective batch; None: nothing does."""
    return next((one for one in _fitting(plan) if _accepted(plan, one)), None)


def _fitting(plan: Plan) -> list[Alternative]:
    """Combinations of changes that fit, the fastest first."""
    found = []
    for changes in product(*([{}, *axis] for axis in _axes(plan))):
        together = {path: value for change in changes for path, value in change.items()}
        work = _work(plan, together)
        # Most do not fit, or are as the plan is: their time need not be known.
        if together and gpu_memory(plan.facts, work).total <= plan.usable:
            found.append(_priced(plan, together))
    return sorted(found, key=lambda one: one.order)


def alternative_json(one: Alternative) -> dict[str, Any]:
    """For programs."""
    return {
        "changes": dict(one.changes),
        "fits": one.fits,
        "memory": one.memory.total,
        "over": one.over,
        "step_seconds": one.time.seconds,
        "tokens_per_second": one.time.tokens_per_second,
    }


def _axes(plan: Plan) -> list[list[dict[str, object]]]:
    """What may be changed; of each, the other values than the plan's own."""
    config, now = plan.config, plan.work
    axes: list[list[dict[str, object]]] = [
        [{_BATCH: batch, _ACCUMULATION: steps} for batch, steps in _batches(now)],
        [
            {_RECOMPUTED: kind, _OFFLOAD: offload}
            for kind, offload in (("none", False), ("selective", False), ("full", False), ("full", True))
            if (kind, offload) != (now.checkpointing, now.offload_activations)
            and (plan.facts.machine.device == "cuda" or not offload)
        ],
    ]
    if plan.facts.machine.device == "cuda":
        precisions = [
            ({_PRECISION: "bf16", _FP8_COMPUTE: False}, (False, False)),
            ({_PRECISION: "fp8", _FP8_COMPUTE: False}, (True, False)),
            ({_PRECISION: "fp8", _FP8_COMPUTE: True}, (True, True)),
        ]
        axes.append([changes for changes, held in precisions if held != (now.fp8, now.fp8_compute)])
        axes.append([{_OFFLOAD_PARAMS: not config.parallel.offload_params}])
    if plan.facts.machine.world_size > 1:
        axes.append(list(_shardings(plan)))
    return axes


def _batches(work: Work) -> Iterator[tuple[int, int]]:
    """Other micro-batches with as many rows in a step."""
    rows = work.batch * work.accumulation
    for batch in (2**power for power in range(rows.bit_length())):
        if rows % batch == 0 and batch != work.batch:
            yield batch, rows // batch


def _shardings(plan: Plan) -> Iterator[dict[str, object]]:
    now, nodes = plan.work, plan.facts.machine.nodes
    ranks = sum(nodes)
    for shards in dict.fromkeys((1, now.shards, sharding.within_a_node(nodes), ranks)):
        name = "replicate" if shards == 1 else "full" if shards == ranks else "hybrid"
        for reshard in (True, False) if shards > 1 else (True,):
            if (shards, reshard) != (now.shards, now.reshard if shards > 1 else True):
                kept: object = reshard if shards > 1 else "auto"
                yield {_SHARD: name, _SHARD_SIZE: shards if name == "hybrid" else None, _RESHARD: kept}


def _work(plan: Plan, changes: Changes) -> Work:
    return work_with(work_of(_changed(plan.config, changes), plan.facts), plan.data)


def _priced(plan: Plan, changes: Changes) -> Alternative:
    work = _work(plan, changes)
    real = {path: value for path, value in changes.items() if not _same(plan.run.settings.value(path), value)}
    memory, time = gpu_memory(plan.facts, work), step_time(plan.facts, work, plan.cluster)
    return Alternative(real, work, memory, time, plan.usable)


def _same(one: object, other: object) -> bool:
    words = {True: "full", False: "none"}
    return one == other or {words.get(one, one), words.get(other, other)} in ({"full"}, {"none"})  # type: ignore[call-overload]


def _changed(config: RunConfig, changes: Changes) -> RunConfig:
    """Without checks: thousands of them would take seconds."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, _, key = path.partition(".")
        value = {"full": True, "none": False}.get(str(value), value) if path == _RECOMPUTED else value
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _accepted(plan: Plan, one: Alternative) -> bool:
    """Whether `train` would take it."""
    values = plan.config.model_dump()
    for path, value in one.changes.items():
        section, _, key = path.partition(".")
        values[section][key] = value
    try:
        config = RunConfig.model_validate(values)
        if any(True for _ in cross_checks(config)):
            return False
        settings = plan.run.settings
        for path, value in one.changes.items():
            settings = settings.with_auto(path, value, "an alternative")
        resolve(settings, plan.facts)
    except (ValidationError, UserInputError):
        return False
    return True
