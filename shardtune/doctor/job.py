"""For which run shall the machine be fit? Its config, this node, its processes, and what they will need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.launch.process_role import Node
from shardtune.model.locate import looks_local

if TYPE_CHECKING:
    from shardtune.config.schema import RunConfig
    from shardtune.plan.host import HostMemory


@dataclass(frozen=True)
class Job:
    """What checks know of the run.

    Attributes:
        device: cpu | cuda
        grace: Seconds between SIGTERM and SIGKILL.
        needs: By the plan; None = unknown.
    """

    config: RunConfig | None = None
    node: Node = Node()  # noqa: RUF009 - frozen
    nproc: int = 1
    device: str = "cpu"
    grace: float = 30.0
    needs: HostMemory | None = None

    @property
    def output(self) -> Path:
        return Path(self.config.train.output_dir if self.config else "runs").expanduser().absolute()

    @property
    def model(self) -> Path | None:
        """The model's folder where it is a local one."""
        name = self.config.model.model_name_or_path if self.config else ""
        return Path(name).expanduser().absolute() if name and looks_local(name) else None

    @property
    def uses_nccl(self) -> bool:
        return self.device == "cuda" and self.nproc * self.node.nnodes > 1
