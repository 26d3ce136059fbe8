"""What does a run expect of itself, and how near was it? The plan's peak and step time beside the measured ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtune.errors import UserInputError
from shardtune.machine import usable_cores
from shardtune.plan.catalogue import for_cores, load_catalogue
from shardtune.plan.memory import gpu_memory
from shardtune.plan.report import work_with
from shardtune.plan.step_time import step_time
from shardtune.plan.work import work_of
from shardtune.terminal import duration, size

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.data.estimate import DataSize
    from shardtune.plan.catalogue import Cluster
    from shardtune.plan.facts import Facts, Machine
    from shardtune.plan.memory import GpuMemory
    from shardtune.plan.step_time import StepTime


@dataclass(frozen=True)
class Expected:
    """Of one run.

    Attributes:
        time: None where nobody knows how fast this GPU is.
        measured: The rates behind `time` were measured on such a GPU.
        coarse: On a CPU: an order of magnitude.
    """

    memory: GpuMemory
    time: StepTime | None
    measured: bool
    coarse: bool

    def event(self) -> dict[str, Any]:
        """As the event `plan` has it."""
        time = self.time
        return {
            "memory": {**self.memory.parts(), "allocated": self.memory.allocated, "total": self.memory.total},
            "known_by": self.memory.known_by,
            "coarse": self.coarse,
            **(
                {}
                if time is None
                else {
                    "step_seconds": time.seconds,
                    "tokens_per_second": time.tokens_per_second,
                    "measured": self.measured,
                }
            ),
        }

    def beside(self, peak: int | None, step_seconds: float | None) -> str:
        """`peak 83.1 GiB of 83.7 GiB planned (-0.7 %), step 1.02 s of 991 ms planned (+2.9 %)`; or nothing.

        Args:
            peak: The most bytes in tensors of this rank.
            step_seconds: The median.
        """
        found: list[str] = []
        if self.coarse:
            return ""
        if peak is not None:
            planned = self.memory.allocated
            found.append(f"peak memory {size(peak)} of {size(planned)} planned ({difference(peak, planned)})")
        if step_seconds is not None and self.time is not None:
            planned_seconds = self.time.seconds
            of = f"{duration(step_seconds)} of {duration(planned_seconds)} planned"
            found.append(f"step {of} ({difference(step_seconds, planned_seconds)})")
        return ", ".join(found)


def expected_of(facts: Facts, config: RunConfig, data: DataSize) -> Expected:
    """Args:
    config: With nothing left open.
    data: As it was prepared.
    """
    work = work_with(work_of(config, facts), data)
    cluster = _cluster(facts.machine)
    return Expected(
        gpu_memory(facts, work),
        step_time(facts, work, cluster) if cluster is not None else None,
        measured=cluster is not None and cluster.gpu.measured,
        coarse=facts.machine.device == "cpu",
    )


def difference(actual: float, planned: float) -> str:
    """`+2.9 %`."""
    return f"{100 * (actual / planned - 1):+.1f} %" if planned else "none planned"


def _cluster(machine: Machine) -> Cluster | None:
    catalogue = load_catalogue()
    if machine.device == "cpu":
        gpu = for_cores(catalogue.gpu("CPU"), max(1, usable_cores() // machine.processes_here))
        return catalogue.cluster(gpu, machine.nodes)
    try:
        return catalogue.cluster(catalogue.gpu(machine.gpu), machine.nodes)
    except UserInputError:  # not in the catalogue: the run goes on without an expected time
        return None
