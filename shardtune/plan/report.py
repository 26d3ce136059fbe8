"""What will a run need, and how long will it take? All that `shardtune plan` says, as one object.

`assemble` asks the same `resolve` as `train` does, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError
from shardtune.plan.communication import model_bytes
from shardtune.plan.host import HostMemory, host_memory
from shardtune.plan.memory import GpuMemory, gpu_memory, usable
from shardtune.plan.resolve import ResolvedRun, resolve
from shardtune.plan.run_time import RunTime, run_time
from shardtune.plan.step_time import NODES, ScalingPoint, StepTime, scaling, step_time
from shardtune.plan.steps import TrainingMath, training_math
from shardtune.plan.traffic import StepTraffic, adapter_layout, step_traffic
from shardtune.plan.work import work_of

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.data.estimate import DataSize
    from shardtune.plan.activations import LayerActivations
    from shardtune.plan.catalogue import Cluster
    from shardtune.plan.facts import Facts
    from shardtune.plan.work import Work


@dataclass(frozen=True)
class Plan:
    """A run as it would be; what is not asked for is not computed.

    Attributes:
        asked: The settings as they were given.
        run: With nothing left open, and the reason of each choice.
        data: None where it cannot be told without preparing it.
        traced: What a trace found for each kind of layer, to go by instead of the table.
    """

    asked: ResolvedConfig
    run: ResolvedRun
    facts: Facts
    cluster: Cluster
    data: DataSize | None
    traced: Sequence[LayerActivations] = ()

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @cached_property
    def work(self) -> Work:
        return work_with(work_of(self.config, self.facts), self.data)

    @cached_property
    def memory(self) -> GpuMemory:
        return gpu_memory(self.facts, self.work, self.traced)

    @property
    def capacity(self) -> int:
        """Bytes a rank has."""
        return self.facts.machine.memory

    @property
    def usable(self) -> int:
        """Bytes of them that a run may fill."""
        return usable(self.capacity, self.facts.machine.device)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable and not self.lacks_host_memory

    @property
    def lacks_host_memory(self) -> bool:
        """Known where the plan is for this machine. (On a CPU, a rank's memory is its part of the host's.)"""
        machine = self.facts.machine
        return machine.device == "cuda" and 0 < machine.host_memory < self.host.per_node

    @cached_property
    def host(self) -> HostMemory:
        return host_memory(self.facts, self.work, self.config)

    @cached_property
    def math(self) -> TrainingMath | None:
        """None where the data is not known."""
        if self.data is None:
            return None
        train, processes = self.config.train, self.facts.machine.world_size
        rows = self.data.sequences if train.packing is True else self.data.rows
        return training_math(train, rows=rows, tokens=self.data.tokens, processes=processes)

    @property
    def steps(self) -> int | None:
        if self.math is not None:
            return self.math.steps
        return self.config.train.max_steps if self.config.train.max_steps > 0 else None

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.facts, self.work, self.cluster)

    @cached_property
    def total(self) -> RunTime | None:
        """Of the whole run; None where nobody knows how many steps it has."""
        if self.steps is None:
            return None
        evaluations, saves = _times(self.config, self.steps, self.math)
        rows = self.data.validation if self.data is not None else 0
        return run_time(
            self.facts,
            self.work,
            self.cluster,
            steps=self.steps,
            evaluations=evaluations,
            eval_rows=rows,
            saves=saves,
        )

    @cached_property
    def traffic(self) -> StepTraffic:
        """What a step sends."""
        nodes = [node for node, ranks in enumerate(self.facts.machine.nodes) for _ in range(ranks)]
        model = model_bytes(self.facts, self.work)
        return step_traffic(
            model,
            replicas=len(nodes) // self.work.shards,
            nodes=nodes,
            micro_batches=self.work.accumulation,
            reshard_after_forward=self.work.reshard,
            offload_params=self.work.offload_params,
            adapters=adapter_layout(model, len(nodes)).adapters,
        )

    @cached_property
    def scaling(self) -> list[ScalingPoint]:
        """The run as it would be resolved on each number of nodes, its own too; those that its settings allow."""
        counts = sorted({*NODES, len(self.facts.machine.nodes)})
        works = {nodes: work for nodes in counts if (work := self._work_on(nodes)) is not None}
        return scaling(self.facts, works.__getitem__, self.cluster, list(works))

    def _work_on(self, nodes: int) -> Work | None:
        machine = replace(self.facts.machine, nodes=self.facts.machine.nodes[:1] * nodes)
        there = replace(self.facts, machine=machine)
        try:
            return work_with(work_of(resolve(self.asked, there).config, there), self.data)
        except UserInputError:  # such as an effective batch that so many processes cannot divide
            return None


def assemble(asked: ResolvedConfig, facts: Facts, cluster: Cluster, data: DataSize | None) -> Plan:
    """The plan of a config on a cluster.

    Raises:
        UserInputError: as `train` would, unless that is for memory: a plan says what fits instead.
    """
    guards = asked.config.guards.model_copy(update={"memory_plan": "off"})
    asked = replace(asked, config=asked.config.model_copy(update={"guards": guards}))
    return Plan(asked, resolve(asked, facts), facts, cluster, data)


def _times(config: RunConfig, steps: int, math: TrainingMath | None) -> tuple[int, int]:
    """How often it evaluates and saves."""
    train = config.train
    epochs = -(-steps // math.steps_per_epoch) if math is not None else 1

    def times(strategy: str, every: int) -> int:
        return {"no": 0, "epoch": epochs}.get(strategy, steps // every)

    return times(train.eval_strategy, train.eval_steps), times(train.save_strategy, train.save_steps)


def work_with(work: Work, data: DataSize | None) -> Work:
    """What a rank does in a step, with how full the rows are."""
    if data is None:
        return work
    return replace(
        work, fill=data.fill(work.length, packed=work.packed), document=min(work.length, data.tokens / data.rows)
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """For programs: docs/plan.md lists the fields. Sizes in bytes, times in seconds."""
    machine, time, math = plan.facts.machine, plan.time, plan.math
    return {
        "version": 1,
        "fits": plan.fits,
        "machine": {
            "device": machine.device,
            "gpu": plan.cluster.gpu.name,
            "memory": machine.memory,
            "nodes": list(machine.nodes),
            "within": plan.cluster.within.name,
            "between": plan.cluster.between.name,
            "measured": plan.cluster.gpu.measured,
        },
        "model": {
            "model_type": plan.facts.model_type,
            "parameters": plan.facts.parameters,
            "layers": plan.facts.layers,
            "trained": plan.facts.trained,
        },
        "choices": [{"setting": path, "value": value, "reason": why} for path, value, why in choices(plan.run)],
        "notices": [notice.text for notice in plan.run.notices],
        "memory": {
            **plan.memory.parts(),
            "allocated": plan.memory.allocated,
            "total": plan.memory.total,
            "capacity": plan.capacity,
            "usable": plan.usable,
            "moment": plan.memory.moment,
            "known_by": plan.memory.known_by,
        },
        "host": asdict(plan.host),
        "data": asdict(plan.data) if plan.data is not None else None,
        "training": None
        if math is None
        else {**asdict(math), "effective_batch": math.effective_batch, "total_tokens": math.total_tokens},
        "time": {
            **asdict(time),
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
        },
        "total": {**asdict(plan.total), "seconds": plan.total.seconds} if plan.total is not None else None,
        "traffic": asdict(plan.traffic),
        "scaling": [
            {
                "nodes": point.nodes,
                "tokens_per_second": point.step.tokens_per_second,
                "efficiency": point.efficiency,
                "communication": point.communication,
                "dominated": point.dominated,
            }
            for point in plan.scaling
        ],
    }


def choices(run: ResolvedRun) -> list[tuple[str, object, str]]:
    """Every setting that was chosen for the user: its path, value, and why."""
    return [
        (path, run.settings.value(path), why) for path in run.settings.origins if (why := run.reason(path)) is not None
    ]
