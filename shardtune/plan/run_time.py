"""How long does the whole run take? Steps, and coarsely what is around them: start, evaluations, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from shardtune.plan.catalogue import Cluster
from shardtune.plan.facts import Facts
from shardtune.plan.step_time import evaluation_seconds, step_time
from shardtune.plan.work import Work

DISK = 1e9  # bytes a second that a node reads and writes, where nobody says another rate
_IMPORTS = 20.0  # seconds: processes, libraries, process group, reading the config and the tokenizer
_COMPILE = 40.0  # seconds of the first steps, where layers are compiled
_SAVED_BYTES = 12  # per trained parameter: its value and Adam's two moments, float32


@dataclass(frozen=True)
class RunTime:
    """Seconds. All but `training` are coarse: a factor of two either way.

    Attributes:
        starting: Libraries, reading the weights at the disk's rate, compiling. Without downloads and tokenising.
        saving: Adapters and optimizer state at the disk's rate; the run trains on meanwhile, so this is an upper bound.
    """

    starting: float
    training: float
    evaluating: float
    saving: float

    @property
    def seconds(self) -> float:
        return self.starting + self.training + self.evaluating + self.saving


def run_time(
    facts: Facts,
    work: Work,
    cluster: Cluster,
    *,
    steps: int,
    evaluations: int = 0,
    eval_rows: int = 0,
    saves: int = 0,
    disk: float = DISK,
) -> RunTime:
    """Of a run of so many optimizer steps.

    Args:
        eval_rows: Rows of each evaluation, over all ranks.
        disk: Bytes a second of one node.
    """
    batches = ceil(eval_rows / (cluster.world_size * max(1, work.eval_batch)))
    evaluated = replace(work, batch=max(1, work.eval_batch))
    return RunTime(
        starting=_IMPORTS + _read_bytes(facts, work, cluster) / disk + (_COMPILE if work.compiled else 0.0),
        training=steps * step_time(facts, work, cluster).seconds,
        evaluating=evaluations * batches * evaluation_seconds(facts, evaluated, cluster),
        saving=saves * facts.trained * _SAVED_BYTES / disk,
    )


def _read_bytes(facts: Facts, work: Work, cluster: Cluster) -> float:
    """Of the checkpoint, by one node: its ranks' shards, and what several of them hold once."""
    stored = facts.quantised + (facts.parameters - facts.quantised) * facts.value_bytes
    return stored * min(1.0, max(cluster.nodes) / work.shards)
