"""What a run would choose for a model, without a run: facts of a toy, and of a machine that need not be here."""

from __future__ import annotations

from typing import Any

from shardtune.config import ResolvedConfig
from shardtune.model.families.registry import family_of
from shardtune.model.model_outline import outline_of
from shardtune.plan.facts import Machine
from shardtune.plan.gather import gather_facts
from shardtune.plan.resolve import ResolvedRun, resolve

CPU = Machine("cpu", memory=64 << 30, processes_here=1, nodes=(1,))
GPU = Machine("cuda", memory=80 << 30, processes_here=1, nodes=(1,))


def resolved_for(asked: ResolvedConfig, model: Any, machine: Machine = CPU, filled: float = 0.5) -> ResolvedRun:
    """Args:
    model: A plain transformers model.
    filled: How much of data.max_length a row takes on average.
    """
    outline = outline_of(model, family_of(model))
    return resolve(asked, gather_facts(asked.config, outline, machine, lambda: filled))
