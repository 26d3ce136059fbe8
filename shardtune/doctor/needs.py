"""What will the run need of this node? Host memory, shared memory and disk by the plan, from the model's files."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from shardtune.doctor.finding import Finding, fail, ok
from shardtune.doctor.job import Job, Needs
from shardtune.doctor.system import System
from shardtune.errors import UserInputError
from shardtune.machine import memory_limit
from shardtune.model.outline import NeedsTorch, read_outline
from shardtune.model.safetensors_headers import read_headers
from shardtune.plan.facts import Machine
from shardtune.plan.gather import gather_facts
from shardtune.plan.resolve import resolve
from shardtune.terminal import size

if TYPE_CHECKING:
    from shardtune.config import ResolvedConfig


def plan_needs(asked: ResolvedConfig, system: System, job: Job) -> tuple[Needs | None, Finding | None]:
    """None where the model is not here, or cannot be described without building it."""
    if importlib.util.find_spec("shardtune.plan.host") is None or job.model is None or not job.model.is_dir():
        return None, None
    host_memory = importlib.import_module("shardtune.plan.host").host_memory
    work_of = importlib.import_module("shardtune.plan.work").work_of
    config = asked.config
    try:
        outline = read_outline(config.model, job.model, read_headers(job.model))
        facts = gather_facts(config, outline, _machine(system, job), lambda: 1.0)
        run = resolve(asked.on_device(job.device), facts)
        found = host_memory(facts, work_of(run.config, facts), run.config)
    except NeedsTorch:
        return None, None
    except UserInputError as error:
        return None, fail("plan", " ".join(filter(None, (error.what, error.why))), error.fix)
    needs = Needs(found.per_node, found.shm, found.checkpoint, found.disk)
    evidence = f"{size(needs.host)} of host memory on this node, {size(needs.disk)} of disk for checkpoints"
    return needs, ok("plan", f"the run needs about {evidence}")


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
    )
