"""What will the run need of this node? Host memory, shared memory and disk by the plan, from the model's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtune.doctor.job import Job
from shardtune.doctor.system import System
from shardtune.machine import lacks_bf16, memory_limit
from shardtune.model.outline import NeedsTorch, read_outline
from shardtune.model.safetensors_headers import read_headers
from shardtune.plan.facts import Machine
from shardtune.plan.gather import gather_facts
from shardtune.plan.host import HostMemory, host_memory
from shardtune.plan.resolve import resolve
from shardtune.plan.work import work_of

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig


def plan_needs(asked: ResolvedConfig, system: System, job: Job) -> HostMemory | None:
    """None where the model is not here, or cannot be described without building it.

    Raises:
        UserInputError: as `train` would: something was asked for that this machine or model cannot do.
    """
    if job.model is None or not (job.model / "config.json").is_file() or asked.config.model.weights != "checkpoint":
        return None
    try:
        outline = read_outline(asked.config.model, job.model, read_headers(job.model))
    except NeedsTorch:
        return None
    facts = gather_facts(asked.config, outline, _machine(system, job), lambda: 1.0)
    config = resolve(asked.on_device(job.device), facts).config
    return host_memory(facts, work_of(config, facts), config)


def _machine(system: System, job: Job) -> Machine:
    cards, host = system.visible_gpus, memory_limit()
    on_gpu = job.device == "cuda" and bool(cards)
    return Machine(
        device=job.device,
        memory=min(int(card.get("memory", 0)) for card in cards) if on_gpu else host // job.nproc,
        processes_here=job.nproc,
        nodes=(job.nproc,) * job.node.nnodes,
        gpu=str(cards[0].get("name", "")) if on_gpu else "",
        host_memory=host,
        lacks_bf16=not on_gpu and lacks_bf16(),
    )
