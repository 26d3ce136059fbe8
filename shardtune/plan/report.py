"""What will a run need, and how long will it take? All that `shardtune plan` says, as one object.

`assemble` asks the same `resolve` as `train` does, so that the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError
from shardtune.plan._pending import work_of
from shardtune.plan.communication import model_bytes
from shardtune.plan.host import HostMemory, host_memory
from shardtune.plan.memory import GpuMemory, gpu_memory, usable
from shardtune.plan.resolve import ResolvedRun, resolve
from shardtune.plan.run_time import RunTime, run_time
from shardtune.plan.step_time import ScalingPoint, StepTime, scaling, step_time
from shardtune.plan.steps import TrainingMath, training_math
from shardtune.plan.traffic import StepTraffic, adapter_layout, step_traffic

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig
    from shardtune.config.schema import RunConfig
    from shardtune.data.estimate import DataSize
    from shardtune.plan.catalogue import Cluster
    from shardtune.plan.facts import Facts
    from shardtune.plan.work import Work

PARTS = (
    "weights", "gathered", "adapters", "gradients", "optimizer", "activations", "working", "loss", "communication",
    "context",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A run as it would be.

    Attributes:
        run: The settings with nothing left open, and the reason of each choice.
        data: None where it cannot be told without preparing it.
        math: None without `data`.
    """

    run: ResolvedRun
    facts: Facts
    cluster: Cluster
    work: Work
    memory: GpuMemory
    host: HostMemory
    traffic: StepTraffic
    time: StepTime
    scaling: tuple[ScalingPoint, ...]
    data: DataSize | None
    math: TrainingMath | None

    @property
    def config(self) -> RunConfig:
        return self.run.config

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
        return self.memory.total <= self.usable

    @property
    def steps(self) -> int | None:
        if self.math is not None:
            return self.math.steps
        return self.config.train.max_steps if self.config.train.max_steps > 0 else None

    @property
    def total(self) -> RunTime | None:
        """Of the whole run; None where nobody knows how many steps it has."""
        if self.steps is None:
            return None
        evaluations, saves = _times(self.config, self.steps, self.math)
        return run_time(
            self.facts,
            self.work,
            self.cluster,
            steps=self.steps,
            evaluations=evaluations,
            eval_rows=self.data.validation if self.data is not None else 0,
            saves=saves,
        )


def assemble(asked: ResolvedConfig, facts: Facts, cluster: Cluster, data: DataSize | None) -> Plan:
    """The plan of a config on a cluster.

    Raises:
        UserInputError: as `train` would.
    """
    run = resolve(asked, facts)
    config = run.config
    work = work_with(work_of(config, facts), data)
    math = None
    if data is not None:
        packed = config.train.packing is True
        rows = data.sequences if packed else data.rows
        math = training_math(config.train, rows=rows, tokens=data.tokens, processes=facts.machine.world_size)
    return Plan(
        run=run,
        facts=facts,
        cluster=cluster,
        work=work,
        memory=gpu_memory(facts, work),
        host=host_memory(facts, work, config),
        traffic=traffic_of(facts, work),
        time=step_time(facts, work, cluster),
        scaling=_scaling(asked, facts, cluster, data),
        data=data,
        math=math,
    )


def _times(config: RunConfig, steps: int, math: TrainingMath | None) -> tuple[int, int]:
    """How often it evaluates and saves."""
    train = config.train
    epochs = -(-steps // math.steps_per_epoch) if math is not None else 1

    def times(strategy: str, every: int) -> int:
        return {"no": 0, "epoch": epochs}.get(strategy, steps // every)

    return times(train.eval_strategy, train.eval_steps), times(train.save_strategy, train.save_steps)


def _scaling(asked: ResolvedConfig, facts: Facts, cluster: Cluster, data: DataSize | None) -> tuple[ScalingPoint, ...]:
    """Each number of nodes as the run would be resolved there; as far as it can be."""

    def work(nodes: int) -> Work:
        machine = replace(facts.machine, nodes=facts.machine.nodes[:1] * nodes)
        there = replace(facts, machine=machine)
        return work_with(work_of(resolve(asked, there).config, there), data)

    try:
        return tuple(scaling(facts, work, cluster))
    except UserInputError:  # settings that only fit some numbers of nodes, such as parallel.shard_size
        return ()


def work_with(work: Work, data: DataSize | None) -> Work:
    """What a rank does in a step, with how full the rows are."""
    if data is None:
        return work
    return replace(
        work, fill=data.fill(work.length, packed=work.packed), document=min(work.length, data.tokens / data.rows)
    )


def traffic_of(facts: Facts, work: Work) -> StepTraffic:
    """What a step sends."""
    nodes = [node for node, ranks in enumerate(facts.machine.nodes) for _ in range(ranks)]
    model = model_bytes(facts, work)
    return step_traffic(
        model,
        replicas=len(nodes) // work.shards,
        nodes=nodes,
        micro_batches=work.accumulation,
        reshard_after_forward=work.reshard,
        offload_params=work.offload_params,
        adapters=adapter_layout(model, len(nodes)).adapters,
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
            **memory_parts(plan.memory),
            "allocated": plan.memory.allocated,
            "total": plan.memory.total,
            "capacity": plan.capacity,
            "usable": plan.usable,
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


def memory_parts(memory: GpuMemory) -> dict[str, int]:
    return {part: getattr(memory, part) for part in PARTS}


def choices(run: ResolvedRun) -> list[tuple[str, object, str]]:
    """Every setting that was chosen for the user: its path, value, and why."""
    return [
        (path, run.settings.value(path), why) for path in run.settings.origins if (why := run.reason(path)) is not None
    ]
